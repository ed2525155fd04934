"""Convert the cases of stored runs, benches, suite runs and studies to entries of the history."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil.bundles.cases import BUNDLE_FORMAT
from hil.controller.analysis.bench.store import read_bench
from hil.controller.devices.measuring.grading import grade_measurement
from hil.controller.models.description import digest_of_files
from hil.controller.records.base import read_record
from hil.controller.records.decisions.evaluation import EvaluationRecord
from hil.controller.records.matrix import MatrixRecord
from hil.controller.records.measurements.bench import BenchRecord, SideRecord
from hil.controller.records.measurements.energy import EnergyMeasurement
from hil.controller.records.measurements.history import (
    AnswerError,
    EntryScore,
    HistoryEntry,
    MeasuredBoard,
    SeriesKey,
    SourceState,
    ToolVersions,
)
from hil.controller.records.outputs import StoredComparison
from hil.controller.records.run import DeviceStatistics, RunCase, RunRecord, StoredArtifact, StoredProvenance
from hil.controller.records.stack import map_versions
from hil.controller.records.study import StudyRecord, StudyRow
from hil.controller.records.suite import CaseRecord, SuiteModelFile, SuiteRecord
from hil.controller.storage.history.programs import ProgramSource, combine_digests
from hil.controller.storage.runs import MATRIX, RECORD, Run, RunStore, make_safe_name
from hil.controller.workloads.evaluation.stored import find_evaluation
from hil.controller.workloads.history.case_programs import CaseProgramFinder
from hil.controller.workloads.history.source_state import SourceOptions, shorten_model
from hil.controller.workloads.suites.reports.results import find_worst_output
from hil.controller.workloads.suites.store import HEAD, SuiteRun, name_suite_run
from hil.core.json_values import read_mapping, read_mappings, read_string
from hil.errors import UsageError

# Values of a board's machine description that do not belong to the software and hardware stack.
_NOT_STACK = ("hostname", "cpu_features", "boot_id")
_BENCH, _STUDY = "bench.json", "study.json"


@dataclass
class Collected:
    """Entries of stored runs, with their programs, and the reasons for cases without entry."""

    entries: list[HistoryEntry] = field(default_factory=list)
    programs: dict[str, ProgramSource] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


class Collector:
    """Collector of entries.

    Args:
        options: source state of the entries.
        finder: finder of programs; None searches the user's cache.
    """

    def __init__(self, options: SourceOptions, finder: CaseProgramFinder | None = None) -> None:
        self._options = options
        self._finder = finder or CaseProgramFinder()
        self.found = Collected()

    def collect(self, folder: Path) -> None:
        """Collect the ended cases of a run, bench, suite run or study, or of all targets of a matrix.

        Raises:
            UsageError: the directory has no such record, or the record is unreadable.
        """
        if (folder / MATRIX).is_file():
            for target in read_record(folder / MATRIX, MatrixRecord).targets:
                place = folder / target.name
                if make_safe_name(target.name) == target.name and any(
                    (place / name).is_file() for name in (HEAD, RECORD)
                ):
                    self.collect(place)
        elif (folder / HEAD).is_file():
            self._collect_suite(SuiteRun.open(folder))
        elif (folder / RECORD).is_file():
            self._collect_run(RunStore(folder.parent).open(str(folder)))
        elif (folder / _STUDY).is_file():
            self._collect_study(folder, read_record(folder / _STUDY, StudyRecord))
        else:
            raise UsageError(
                f"{folder} has no {RECORD}, {HEAD}, {MATRIX} or {_STUDY}",
                hint="give a run, a bench, a suite run, a matrix or a study",
            )

    def _collect_run(self, run: Run) -> None:
        record = run.record
        state = self._options.state_of(record.origin)
        bench = read_bench(run) if (run.folder / _BENCH).is_file() else None
        sides = {side.name: side for side in bench.sides} if bench else {}
        evaluation = find_evaluation(run)
        for case in record.cases:
            side = sides.get(case.name)
            if case.outcome is None:
                self.found.skipped.append(f"{record.id}: {case.name} has not ended")
            elif side is not None and side.from_run is not None:
                # Skip the case, because its program is from an earlier commit.
                self.found.skipped.append(f"{record.id}: {case.name} is from {side.from_run}")
            else:
                program = self._keep_program(case, run)
                entry = make_run_entry(record, case, state, str(run.folder.absolute()), bench, side)
                if evaluation is not None:
                    entry = add_score(entry, evaluation)
                self.found.entries.append(entry.replace(program=program))

    def _keep_program(self, case: RunCase, run: Run) -> str:
        if case.artifact is None:
            return ""
        folders = [run.own(f"{case.name}/program"), Path(case.path).parent]
        bundle = Path(case.path) if case.model is not None and case.model.format == BUNDLE_FORMAT else None
        source = self._finder.find(case.artifact, case.model, folders, bundle)
        digest = combine_digests(case.artifact.digests)
        if source is not None:
            self.found.programs[digest] = source
        return digest

    def _collect_suite(self, run: SuiteRun) -> None:
        state = self._options.state_of(run.head.origin)
        for case in run.read_records():
            digests = self._finder.list_digests(case.program) if case.program else {}
            folders: list[Path] = []
            file = run.head.models.get(case.model)
            if file is not None and _is_program(file, case.program):
                digests, folders = {Path(file.path).name: case.program}, [Path(file.path).parent]
            entry = make_suite_entry(run.head, case, state, str(run.folder.absolute()))
            if source := digests and self._finder.find(_make_artifact(case, digests), None, folders):
                self.found.programs[source.record.digest] = source
                entry = entry.replace(program=source.record.digest)
            self.found.entries.append(entry)

    def _collect_study(self, folder: Path, study: StudyRecord) -> None:
        state = self._options.state_of(study.origin)
        for row in study.rows:
            if row.outcome is not None:
                self.found.entries.append(make_study_entry(study, row, state, folder.absolute()))


def _is_program(file: SuiteModelFile, program: str) -> bool:
    """Return True if a model without external data is the program.

    The digest of a model is the program's digest, or for imported models, the digest of all names and files.
    """
    return bool(program) and file.digest in (program, digest_of_files({Path(file.path).name: program}))


def _make_artifact(case: CaseRecord, digests: dict[str, str]) -> StoredArtifact:
    return StoredArtifact(
        runtime=case.runtime,
        compiler=case.compiler,
        flags=case.flags,
        function=case.function,
        main=next(name for name, digest in digests.items() if digest == case.program),
        digests=digests,
        bytes=case.artifact_bytes or 0,
        cached=True,
        notes={},
    )


def make_run_entry(
    record: RunRecord,
    case: RunCase,
    state: SourceState,
    folder: str,
    bench: BenchRecord | None = None,
    side: SideRecord | None = None,
) -> HistoryEntry:
    """Return the entry of an ended case of `hil run`, `hil bundle run`, `hil trace run` or `hil bench`.

    Args:
        folder: absolute path of the run.
        bench: the bench, if the run is one.
        side: the bench's side with this case.
    """
    artifact, provenance = case.artifact, case.provenance or StoredProvenance()
    device = case.device or DeviceStatistics(iterations=0)
    request = record.request
    flags = _list_user_flags(request)
    if bench is not None and bench.concurrency > 1:
        flags = (*flags, f"--concurrency {bench.concurrency}")
    if side is not None and side.sustained is not None:
        flags = (*flags, f"--sustained {side.sustained.requested_s:g}s")
    name = provenance.board or (record.board.name if record.board else "") or (case.error.board if case.error else "")
    verdict = case.verdicts[0] if case.verdicts else None
    times = side.times if side else None
    counted = side.instructions if side else case.instructions
    p50_ns = times.p50_ns if times else None if device.is_cold_only else device.p50_ns
    return HistoryEntry(
        key=SeriesKey(
            kind="bench" if bench else "run",
            model=shorten_model(case.path),
            case=case.name,
            function=read_string(request.get("function")),
            board=name or read_string(request.get("board")) or read_string(request.get("hw_type")),
            runtime=artifact.runtime if artifact else read_string(request.get("runtime")),
            flags=flags,
        ),
        run=record.id,
        case=case.name,
        folder=folder,
        created=provenance.finished_at or record.created,
        source=state,
        outcome=case.outcome.value if case.outcome else "",
        reason=case.reason,
        error=make_error(verdict.against, verdict.outputs) if verdict else None,
        iterations=times.iterations if times else device.iterations,
        clock=None if p50_ns is None else "host" if side and side.clock == "host" else "board",
        cold_ns=device.cold_ns,
        p50_ns=p50_ns,
        # A series compares only times of the same clock, so the host's clock does not matter.
        grade=grade_measurement(side.conditions, times) if side and times else case.grade,
        samples_ns=[] if device.is_cold_only else [float(one) for one in device.warm_ns],
        instructions=counted if counted and counted.median is not None else None,
        energy=_select_energy(side.energy if side else case.energy),
        peak_memory_bytes=(side.peak_memory_bytes if side else None) or case.peak_memory_bytes,
        program_bytes=artifact.bytes if artifact else None,
        tools=ToolVersions(
            compiler=artifact.compiler if artifact else "",
            runtime=provenance.runtime_version,
            flags=artifact.flags if artifact else [],
            hil=provenance.agent_version,
        ),
        board=make_board(name, provenance.board_id, provenance.device, provenance.machine, provenance.readings).replace(
            notes=provenance.notes, parts=map_versions(provenance.stack) or None
        ),
    )


def _select_energy(found: EnergyMeasurement | None) -> EnergyMeasurement | None:
    """Return a measured energy; None if it was refused."""
    return None if found is None or found.refused else found


def add_score(entry: HistoryEntry, evaluation: EvaluationRecord) -> HistoryEntry:
    """Return the entry of an evaluation. The metric and the dataset belong to the identity of the series."""
    settings, scores = evaluation.settings, evaluation.scores
    flags = [f"--metric {settings.metric}", f"--dataset {shorten_model(settings.dataset)}"]
    flags += [f"--output {settings.output}"] if settings.output else []
    key = entry.key.replace(kind="eval", flags=(*entry.key.flags, *flags))
    if scores is None:
        return entry.replace(key=key)
    score = EntryScore(
        metric=settings.metric,
        board=scores.board,
        reference=scores.reference,
        samples=evaluation.evaluated,
        is_higher_better=evaluation.is_higher_better,
        is_share=evaluation.is_share,
    )
    return entry.replace(key=key, score=score)


def make_suite_entry(head: SuiteRecord, case: CaseRecord, state: SourceState, folder: str) -> HistoryEntry:
    """Return the entry of a suite's case."""
    info = head.board_info.get(case.board, {})
    settings = head.request.get("settings")
    request = {**head.request, **(settings if isinstance(settings, dict) else {})}
    p50_ns = None if case.cold else case.device_p50_ns
    runtimes = [one for one in read_mappings(info.get("runtimes")) if one.get("name") == case.runtime]
    return HistoryEntry(
        key=SeriesKey(
            kind="suite",
            model=case.model,
            case=case.id,
            board=case.board,
            runtime=case.runtime,
            flow=case.flow,
            flags=_list_user_flags(request),
        ),
        run=name_suite_run(head),
        case=case.id,
        folder=folder,
        created=case.started or head.started,
        source=state,
        outcome=case.ended,
        reason=case.message,
        error=make_error(case.against, case.outputs) if case.outputs else None,
        iterations=case.iterations,
        clock=None if p50_ns is None else "board",
        cold_ns=next(iter(case.samples_ns), None) if case.cold else None,
        p50_ns=p50_ns,
        grade=case.grade,
        samples_ns=[] if case.cold else [float(one) for one in case.samples_ns],
        energy=_select_energy(case.energy),
        program=case.program,
        program_bytes=case.artifact_bytes,
        tools=ToolVersions(
            compiler=case.compiler,
            runtime=read_string(runtimes[0].get("version")) if runtimes else "",
            flags=case.flags,
            hil=read_string(info.get("agent_version")),
        ),
        board=make_board(
            case.board,
            read_string(info.get("board_id")),
            "",
            read_mapping(info.get("machine")),
            read_mappings(info.get("readings")),
        ).replace(parts=_read_parts(info)),
    )


def make_study_entry(study: StudyRecord, row: StudyRow, state: SourceState, folder: Path) -> HistoryEntry:
    """Return the entry of an ended row of a study. A study has no device times."""
    return HistoryEntry(
        key=SeriesKey(
            kind="study", model=row.experiment, case=row.experiment, board=study.board.name, runtime=row.toolchain
        ),
        # Studies use the same directory many times.
        run=f"{folder.name}-{study.created:.0f}",
        case=f"{row.experiment} {row.toolchain}",
        folder=str(folder),
        created=study.created,
        source=state,
        outcome=row.outcome.value if row.outcome else "",
        reason=row.message,
        error=AnswerError(against="TensorFlow", max_abs=row.worst.max_abs) if row.worst else None,
        program_bytes=row.bytes,
        tools=ToolVersions(compiler=row.compiler),
        board=MeasuredBoard(name=study.board.name),
    )


def _read_parts(info: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the parts of the stack in a stored description of a board; None if it has none."""
    parts = {read_string(one.get("name")): read_string(one.get("version")) for one in read_mappings(info.get("stack"))}
    return parts or None


def make_error(against: str, outputs: Sequence[StoredComparison]) -> AnswerError:
    """Return the error of the worst output."""
    worst = find_worst_output(outputs)
    names = ("max_abs", "rmse", "sqnr_db", "mismatches")
    return AnswerError(against=against, **{name: getattr(worst, name, None) for name in names})


def make_board(
    name: str, identifier: str, device: str, machine: Mapping[str, Any], readings: Iterable[Mapping[str, Any]]
) -> MeasuredBoard:
    """Return the state of a board from its description (message Machine) and readings (messages Reading)."""
    stack = {key: str(value) for key, value in machine.items() if key not in _NOT_STACK and not isinstance(value, list)}
    values = {}
    for reading in readings:
        key, value = read_string(reading.get("name")), reading.get("value", 0.0)
        if text := read_string(reading.get("text")):
            stack[key] = text
        elif isinstance(value, (int, float)):
            values[key] = float(value)
    return MeasuredBoard(name=name, id=identifier, device=device, stack=stack, readings=values)


def _list_user_flags(request: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the options of a stored request that define a series."""
    flags = request.get("compile_flags")
    dims = request.get("dims")
    sizes = [f"--dim {name}={size}" for name, size in sorted(read_mapping(dims).items())]
    return (*([str(one) for one in flags] if isinstance(flags, list) else []), *sizes)

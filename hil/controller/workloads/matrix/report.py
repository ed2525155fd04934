"""Report on a matrix: a row per case, a column per target, and the differing rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hil.controller.pipeline.records.case_fields import make_case_fields
from hil.controller.records.base import read_record
from hil.controller.records.matrix import (
    MatrixDocument,
    MatrixRecord,
    PrintedCell,
    PrintedRow,
    PrintedTarget,
    TargetError,
)
from hil.controller.records.run import RunBoard, RunCase
from hil.controller.records.suite import CaseRecord
from hil.controller.storage.outcomes import ABSENT, NOT_RUN, exit_code_for, is_failing
from hil.controller.storage.runs import MATRIX, RECORD, Run, RunStore, make_safe_name
from hil.controller.storage.screen.texts import line
from hil.controller.workloads.suites.reports.results import SuiteResults, find_worst_output, load_run
from hil.controller.workloads.suites.reports.tables import GENERATION_COLUMNS
from hil.controller.workloads.suites.store import HEAD as SUITE_HEAD
from hil.core.results import Outcome, choose_exit_code
from hil.core.text import make_names_unique
from hil.errors import EXIT_INTERRUPTED, UsageError


@dataclass(frozen=True)
class TargetResults:
    """Column of a matrix: case results on a target."""

    name: str
    run: SuiteResults
    error: TargetError | None = None  # why the target could not run

    @property
    def exit_code(self) -> int:
        """The exit code of the run, or of the cases so far."""
        if self.run.interrupted:
            return EXIT_INTERRUPTED
        codes = [exit_code_for(one.outcome) for one in self.run.records if one.outcome != Outcome.SKIP]
        return choose_exit_code(codes if self.error is None else [*codes, self.error.exit_code])


@dataclass(frozen=True)
class MatrixCell:
    """Result of a case on a target."""

    word: str  # outcome, ``not run``, or ``absent`` if the target lacks the case
    record: CaseRecord | None = None
    message: str = ""

    @property
    def statistics(self) -> dict[str, Any]:
        """Values for reports in addition to the outcome; empty if the case did not run."""
        if (record := self.record) is None:
            return {}
        worst = find_worst_output(record.outputs)
        found = {
            "stage": record.stage if is_failing(record.outcome) else "",
            "message": self.message,
            **{name: getattr(worst, name, None) for name in ("mismatches", "max_abs", "sqnr_db")},
            "device_p50_ms": None if record.device_p50_ns is None else record.device_p50_ns / 1e6,
            "iterations": record.iterations or None,
            "cold": record.cold if record.iterations else None,
            "grade": record.grade and record.grade.grade,
            **{column.name: column.value(record) for column in GENERATION_COLUMNS if column.name in _OF_PROMPTS},
        }
        return {key: value for key, value in found.items() if value not in (None, "")}


STATISTICS = ("stage", "message", "mismatches", "max_abs", "sqnr_db", "device_p50_ms", "iterations", "cold", "grade")
# Names of :data:`GENERATION_COLUMNS` in a matrix with prompts.
_OF_PROMPTS = ("worst_kl", "ttft_ms", "tpot_p50_ms", "decode_tokens_per_s")


@dataclass(frozen=True)
class MatrixRow:
    """Results of a case on all targets."""

    id: str
    model: str
    layer: str
    op: str
    cells: tuple[MatrixCell, ...]  # in target order

    @property
    def differs(self) -> bool:
        """Whether the outcomes differ between targets."""
        return len({cell.word for cell in self.cells}) > 1

    @property
    def fails(self) -> bool:
        """Whether the case needs attention on any target."""
        return any(is_failing(cell.word) for cell in self.cells if cell.word not in (NOT_RUN, ABSENT))


class MatrixReport:
    """Results of multiple targets as a table."""

    def __init__(self, title: str, targets: Sequence[TargetResults]) -> None:
        self.title = title
        self.targets = tuple(targets)
        self.rows = tuple(_build_rows(self.targets))
        self.differing = tuple(row for row in self.rows if row.differs)

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the cells' statistics. Only a matrix with prompts has the statistics of generations."""
        records = (cell.record for row in self.rows for cell in row.cells)
        return STATISTICS + (_OF_PROMPTS if any(one and one.generation for one in records) else ())

    @property
    def exit_code(self) -> int:
        """The most severe exit code of the targets."""
        return choose_exit_code([target.exit_code for target in self.targets])

    @property
    def notes(self) -> list[str]:
        """Errors of targets and notes on their runs."""
        found = [f"{one.name}: {line(one.error.message)}" for one in self.targets if one.error is not None]
        return found + [f"{one.name}: {note}" for one in self.targets for note in one.run.notes]

    def to_document(self, folder: Path | None) -> MatrixDocument:
        """Return the report as a document for `--json`.

        Args:
            folder: the directory of the matrix, or None.
        """
        targets = [
            PrintedTarget(
                name=one.name,
                folder=str(one.run.folder) if one.error is None else "",
                flow=one.run.flow,
                runtime=one.run.runtime,
                boards=list(one.run.boards),
                error=one.error,
                exit_code=one.exit_code,
            )
            for one in self.targets
        ]
        rows = [
            PrintedRow(
                id=row.id,
                model=row.model,
                layer=row.layer,
                op=row.op,
                differs=row.differs,
                cells={
                    target.name: PrintedCell(outcome=cell.word, **cell.statistics)
                    for target, cell in zip(self.targets, row.cells, strict=True)
                },
            )
            for row in self.rows
        ]
        return MatrixDocument(
            folder=str(folder or ""),
            title=self.title,
            targets=targets,
            rows=rows,
            differing=len(self.differing),
            exit_code=self.exit_code,
        )


def _build_rows(targets: Sequence[TargetResults]) -> Iterable[MatrixRow]:
    known = [{record.id: record for record in target.run.records} for target in targets]
    missing = [set(target.run.missing) for target in targets]
    ids = dict.fromkeys(
        case_id for target in targets for case_id in (*(one.id for one in target.run.records), *target.run.missing)
    )
    for case_id in ids:
        about = next((records[case_id] for records in known if case_id in records), None)
        cells = []
        for target, records, left in zip(targets, known, missing, strict=True):
            if (record := records.get(case_id)) is not None:
                cells.append(MatrixCell(record.outcome, record, line(record.message)))
            elif target.error is not None:
                cells.append(MatrixCell(target.error.outcome or NOT_RUN, None, line(target.error.message)))
            else:
                cells.append(MatrixCell(NOT_RUN if case_id in left else ABSENT))
        found = {name: getattr(about, name) if about else "" for name in ("model", "layer", "op")}
        yield MatrixRow(case_id, **found, cells=tuple(cells))


def load_results(folder: Path) -> SuiteResults:
    """Load a stored run of a suite, models or a bundle. Raises UsageError if the run is missing or unreadable."""
    if (folder / SUITE_HEAD).exists() or not (folder / RECORD).exists():
        return load_run(folder)
    return convert_run(RunStore(folder.parent).open(str(folder)))


def convert_run(run: Run) -> SuiteResults:
    """Convert a run of `hil run` or `hil bundle run` to suite results."""
    record = run.record
    records = [record_of_case(case, record.board) for case in record.cases if case.outcome]
    runtimes = dict.fromkeys(one.runtime for one in records if one.runtime)
    return SuiteResults(
        folder=run.folder,
        id=record.id or run.folder.name,
        source="",
        suite=", ".join(dict.fromkeys(one.model for one in records)),
        flow="",
        runtime=", ".join(runtimes),
        boards=(record.board.name,) if record.board else (),
        started=record.created,
        finished=None,
        exit_code=record.exit_code,
        command=run.resume_command,
        versions={},
        interrupted=record.exit_code == EXIT_INTERRUPTED,
        records=tuple(records),
        missing=tuple(case.name for case in record.cases if not case.outcome),
    )


def record_of_case(case: RunCase, board: RunBoard | None) -> CaseRecord:
    """Convert an ended case from run.json to a suite's case record."""
    outcome = case.outcome.value if case.outcome else ""
    board_of_case = (case.provenance and case.provenance.board) or (case.error and case.error.board)
    return CaseRecord(
        **make_case_fields(case),
        id=case.name,
        model=Path(case.path).stem,
        suite="",
        flow="",
        runtime=case.artifact.runtime if case.artifact else "",
        outcome=outcome,
        ended=outcome,
        board=board_of_case or (board.name if board else ""),
        hw_type=board.hw_type if board else "",
        folder=case.name,
    )


def load_matrix(folder: Path) -> MatrixReport:
    """Load the report of a stored matrix, even if incomplete.

    Raises UsageError if the matrix is missing or unreadable.
    """
    head = read_record(folder / MATRIX, MatrixRecord)
    found = []
    for target in head.targets:
        if make_safe_name(target.name) != target.name:
            raise UsageError(
                f"invalid target name {target.name!r} in {folder / MATRIX}: expected a plain directory name"
            )
        place = folder / target.name
        stored = any((place / file).exists() for file in (SUITE_HEAD, RECORD))
        found.append(
            TargetResults(target.name, load_results(place) if stored else make_empty_results(place), target.error)
        )
    return MatrixReport(head.title, found)


def make_empty_results(folder: Path) -> SuiteResults:
    """Return empty results for a target that did not run."""
    known: dict[str, Any] = dict.fromkeys(("source", "suite", "flow", "runtime", "command"), "")
    known |= dict.fromkeys(("started", "finished", "exit_code"))
    return SuiteResults(folder, folder.name, **known, boards=(), versions={}, interrupted=False, records=())


def combine_runs(folders: Sequence[Path]) -> MatrixReport:
    """Combine stored runs into a matrix.

    The columns are named by properties that differ. A stored matrix adds all its targets.

    Raises:
        UsageError: a run is unreadable, or given twice.
    """
    found: list[TargetResults] = []
    for folder in folders:
        if (folder / MATRIX).exists():
            found += load_matrix(folder).targets
        else:
            found.append(TargetResults("", load_results(folder)))
    seen = [target.run.folder.resolve() for target in found]
    if twice := next((place for place in seen if seen.count(place) > 1), None):
        raise UsageError(f"duplicate run {twice}", hint="specify each run once")
    names = make_names_unique([one.name or other for one, other in zip(found, _choose_names(found), strict=True)])
    targets = [replace(target, name=name) for target, name in zip(found, names, strict=True)]
    suites = dict.fromkeys(target.run.suite for target in targets if target.run.suite)
    return MatrixReport(", ".join(suites), targets)


# Properties that may distinguish stored runs.
_FACTS: tuple[Callable[[SuiteResults], str], ...] = (
    lambda run: run.flow,
    lambda run: run.runtime if not run.flow else "",
    lambda run: "+".join(run.boards),
)


def _choose_names(targets: Sequence[TargetResults]) -> list[str]:
    """Return a name per run from the flow, runtime and boards that differ.

    If such names are not unique, use directory names.
    """
    facts = [[fact(target.run) for target in targets] for fact in _FACTS]
    telling = [values for values in facts if len(set(values)) > 1]
    names = ["-".join(filter(None, values)) for values in zip(*telling, strict=True)] if telling else []
    if len(set(names)) < len(targets):
        names = [target.run.folder.name for target in targets]
    return [make_safe_name(name) for name in names]

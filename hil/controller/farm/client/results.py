"""Fetch the results of a submission: run directories, or one merged suite run of all parts."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from hil.controller.farm.client.answers import check_result_values, check_suite_part, make_answer_error
from hil.controller.farm.client.client import FarmClient, convert_answer_errors
from hil.controller.farm.job_files import PROGRAMS, rebuild_request
from hil.controller.farm.messages import ENDED, JobResult, JobSpec, Kind
from hil.controller.records.base import Record, make_record
from hil.controller.records.lab.farm import JobResultRow, SuitePart, make_suite_part
from hil.controller.records.matrix import TargetError
from hil.controller.records.outputs import Origin
from hil.controller.records.run import RunRecord, make_run
from hil.controller.records.suite import CaseRecord, SuiteRecord
from hil.controller.storage.runs import Run, convert_write_errors, make_safe_name
from hil.controller.storage.sources.origin import find_request_origin
from hil.controller.workloads.matrix.files import write_matrix, write_targets
from hil.controller.workloads.matrix.report import MatrixReport, TargetResults, convert_run, make_empty_results
from hil.controller.workloads.suites.reports import write_reports
from hil.controller.workloads.suites.reports.results import SuiteResults, load_run
from hil.controller.workloads.suites.request import SuiteRequest
from hil.controller.workloads.suites.store import SuiteRun, choose_default_folder, collect_versions
from hil.core.field_types import check_fields
from hil.core.results import Outcome, choose_exit_code, exit_code_of
from hil.core.text import make_names_unique
from hil.errors import EXIT_INTERRUPTED, FarmError, HilError, UsageError

R = TypeVar("R", bound=Record)
_AT_ONCE = 8
# Maximum components in a file's path. A run's directory has six levels.
_MAX_PARTS = 32
# Maximum paths to replace in a text. A command in a case's record contains two paths.
_MAX_REPLACED = 4
# Characters after which a path can start, and characters that can follow a directory's path.
_BEFORE_PATH, _AFTER_PATH = r"(?<![^\s'\"=:,(])", r"(?![^/\s'\":,;)])"


@dataclass(frozen=True)
class EndedJob:
    """Finished job with its result."""

    name: str
    spec: JobSpec
    result: JobResult

    @classmethod
    def from_row(cls, row: JobResultRow) -> EndedJob:
        """Build a job from a row of a farm response. Raises FarmError if the row is invalid."""
        with _name_jobs_in_errors([row.name]):
            values = {name: value for name, value in msgspec.structs.asdict(row).items() if value is not UNSET}
            job = cls(row.name, msgspec.convert(values.get("spec"), JobSpec), msgspec.convert(values, JobResult))
            check_result_values([job.spec.options, job.result.record])
            if job.spec.kind is Kind.SUITE:
                check_suite_part(job.part)
        return job

    @cached_property
    def part(self) -> SuitePart:
        """Record of a part of a suite. Raises FarmError if the record is invalid."""
        return convert_record(self.name, make_suite_part, self.result.record)

    @cached_property
    def run(self) -> RunRecord:
        """Record of a run. Raises FarmError if the record is invalid."""
        return convert_record(self.name, make_run, self.result.record)


@contextlib.contextmanager
def _name_jobs_in_errors(names: Sequence[str]) -> Iterator[None]:
    """Convert errors of reading results to a FarmError that names the jobs.

    Reports read many fields of a record, so any exception can come from an invalid record.
    """
    try:
        yield
    except HilError:
        raise
    except Exception as error:
        raise make_answer_error(error, f"result of job {', '.join(names[:3])}") from error


def convert_record(job: str, make: Callable[[Any], R], values: Any) -> R:
    """Convert a record in a job's result with ``make``. Raises FarmError if it is invalid."""
    try:
        return make(values)
    except UsageError as error:
        raise make_answer_error(error, f"result of job {job}") from error


def read_outcomes(farm: FarmClient, name: str) -> list[EndedJob]:
    """Return the finished jobs of a submission, or a single job.

    Raises:
        UsageError: the job does not exist, or a job has not ended.
    """
    rows = farm.ask("result", name=name, specs=True)
    with convert_answer_errors():
        return _parse_ended_jobs(name, rows)


def _parse_ended_jobs(name: str, rows: Sequence[JobResultRow]) -> list[EndedJob]:
    if not rows:
        raise LookupError(f"job {name} not found")
    if going := [row for row in rows if row.state not in ENDED]:
        what = f"{len(going)} of {len(rows)} jobs have" if len(rows) > 1 else f"job {name} has"
        raise UsageError(f"{what} not ended: job {going[0].name} is {going[0].state}", hint=f"hil farm logs {name} -f")
    return [EndedJob.from_row(row) for row in rows]


def fetch_run(farm: FarmClient, one: EndedJob, folder: Path) -> None:
    """Download the run directory of a job.

    Raises:
        UsageError: the directory exists and is not empty.
        FarmError: the store no longer has a file, or a file's path is invalid.
        StorageError: the directory cannot be written.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty", hint="use a different --out")
    # Programs are only for the farm's history.
    files = {at: digest for at, digest in one.result.files.items() if PurePosixPath(at).parts[:1] != (PROGRAMS,)}
    _download_files(farm, files, folder)


def fetch_suite(farm: FarmClient, ended: Sequence[EndedJob], out: Path | None) -> SuiteRun:
    """Merge all parts of a suite into a single run, with reports and stored case files.

    Args:
        out: directory of the run; None creates one in ``hil-suites``.

    Raises:
        UsageError: the directory already contains a run.
        FarmError: the store no longer has a file, or a record is invalid.
    """
    with _name_jobs_in_errors([one.name for one in ended]):
        typed = ended[0].spec.options["typed"]
        folder = out or choose_default_folder(typed["suite"], typed["flow_name"])
    run = merge(ended, folder)
    for one in ended:
        cases = {at: digest for at, digest in one.result.files.items() if PurePosixPath(at).parts[:1] == ("cases",)}
        _download_files(farm, cases, folder)
    return run


def fetch_targets(farm: FarmClient, names: Mapping[str, str], out: Path | None) -> tuple[Path | None, MatrixReport]:
    """Compare the results of multiple submissions.

    Args:
        names: target -> submission or job.
        out: directory with a subdirectory for every target. None fetches only suites, to a directory in ``hil-suites``.

    Returns:
        The directory (None if nothing was fetched) and the report.

    Raises:
        UsageError: a job does not exist or has not ended, or the directory is not empty.
        FarmError: the store no longer has a file.
    """
    every = {target: read_outcomes(farm, name) for target, name in names.items()}
    with _name_jobs_in_errors([one.name for ended in every.values() for one in ended]):
        return _compare_targets(farm, every, out)


def _compare_targets(
    farm: FarmClient, every: Mapping[str, Sequence[EndedJob]], out: Path | None
) -> tuple[Path | None, MatrixReport]:
    suites = [ended[0].spec.options["typed"] for ended in every.values() if ended[0].spec.kind is Kind.SUITE]
    if suites and len(suites) < len(every):
        raise UsageError("suites and models cannot be compared side by side", hint="use jobs of the same kind")
    folder = out or (choose_default_folder(suites[0]["suite"], "matrix") if suites else None)
    targets = []
    for target, ended in every.items():
        place = (folder or Path()) / target
        if suites:
            targets.append(TargetResults(target, load_run(fetch_suite(farm, ended, place).folder)))
            continue
        for one in ended if out else ():
            fetch_run(farm, one, place if len(ended) == 1 else place / one.name)
        targets.append(_combine_jobs(target, ended, place))
    named = (one["suite"] for one in suites) if suites else (one.run.suite for one in targets if one.run.suite)
    title = ", ".join(dict.fromkeys(named)) or "farm"
    report = MatrixReport(title, targets)
    if suites and folder:
        first = next(iter(every.values()))[0]
        write_targets(folder, title, [target.name for target in targets], _read_origin(first))
    elif folder:
        write_matrix(report, folder)
    return folder, report


def _combine_jobs(target: str, ended: Sequence[EndedJob], folder: Path) -> TargetResults:
    """Combine the jobs of a model or bundle submission into one column."""
    files = [(one.spec.options.get("models") or [one.name])[0] for one in ended]
    labels = make_names_unique([make_safe_name(PurePosixPath(file).stem) for file in files])
    runs, failed = [], []
    for one, label in zip(ended, labels, strict=True):
        if not one.result.record.get("cases"):
            failed.append(one)
            continue
        run = convert_run(Run(folder, one.run))
        runs.append(_rename_cases(run, one, label) if len(ended) > 1 else run)
    whole = replace(
        make_empty_results(folder),
        suite=", ".join(run.suite for run in runs if run.suite),
        boards=tuple(dict.fromkeys(board for run in runs for board in run.boards)),
        runtime=", ".join(dict.fromkeys(run.runtime for run in runs if run.runtime)),
        records=tuple(record for run in runs for record in run.records),
        missing=tuple(case for run in runs for case in run.missing),
        interrupted=any(run.interrupted for run in runs),
    )
    return TargetResults(target, whole, _describe_failures(failed) if failed else None)


def _describe_failures(failed: Sequence[EndedJob]) -> TargetError:
    """Describe the jobs without case results. The worst job determines the outcome and the exit code."""
    code = choose_exit_code([one.result.exit_code for one in failed])
    worst = next((one for one in failed if one.result.exit_code == code), failed[0])
    reasons = [f"job {one.name}: {one.result.reason or 'no result'}" for one in failed]
    return TargetError(outcome=worst.result.outcome, message="; ".join(reasons), hint="", exit_code=code)


def _rename_cases(run: SuiteResults, one: EndedJob, label: str) -> SuiteResults:
    """Rename the cases of a job, so that names are unique in the submission."""

    def name(case: str) -> str:
        return label if one.spec.kind is Kind.RUN else f"{label}-{case}"

    records = [each.replace(id=name(each.id), folder=f"{one.name}/{each.folder}") for each in run.records]
    return replace(run, records=tuple(records), missing=tuple(map(name, run.missing)))


def _download_files(farm: FarmClient, files: Mapping[str, str], folder: Path) -> None:
    """Download files in parallel, each digest once.

    Args:
        files: path below the directory -> digest in the store.
    """
    places: dict[str, list[Path]] = {}
    for at, digest in files.items():
        parts = PurePosixPath(at)
        if parts.is_absolute() or ".." in parts.parts or not parts.parts:
            raise FarmError(f"the farm sent a file path outside the run's directory: {at[:200]!r}")
        if len(parts.parts) > _MAX_PARTS:
            raise FarmError(f"the farm sent a file path of more than {_MAX_PARTS} parts: {at[:200]!r}")
        places.setdefault(digest, []).append(folder / parts)

    pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fetch")
    try:
        with convert_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for _ in pool.map(lambda digest: farm.download(digest, *places[digest]), places):
                pass
    finally:
        pool.shutdown(cancel_futures=True)


def merge(parts: Sequence[EndedJob], folder: Path) -> SuiteRun:
    """Merge parts into one suite run with reports. Every case has exactly one record.

    A case without a record gets the outcome and the reason of the part. After an infrastructure failure, or if the part
    has no failed outcome, the outcome is ``BOARD_LOST``. Cases of a cancelled part are missing. This function does not
    fetch stored case files.

    Raises:
        FarmError: a record is invalid.
    """
    with _name_jobs_in_errors([part.name for part in parts]):
        return _merge_parts(parts, folder)


def _merge_parts(parts: Sequence[EndedJob], folder: Path) -> SuiteRun:
    heads = [part.part for part in parts if part.part.cases is not None]
    head = _build_head(parts, heads, folder)
    # The job's options are not validated yet, so their fields may have wrong types.
    run = SuiteRun.create(
        folder, convert_record(parts[0].name, lambda one: make_record(one, SuiteRecord), head.to_json())
    )
    request = SuiteRequest.from_json(run.head.request)
    check_fields(request)
    found: dict[str, CaseRecord] = {}
    for part in parts:
        found |= {case.id: case for case in _list_cases(part, run, request)}
    outcomes = [Outcome(record.outcome) for record in found.values()]
    with run.lock_for_writing():
        for case_id in run.head.ids:
            if case_id in found:
                run.append(found[case_id])
    cut = any(part.result.exit_code == EXIT_INTERRUPTED for part in parts)
    run.save(
        finished=None if cut else run.head.finished,
        interrupted=cut,
        exit_code=EXIT_INTERRUPTED if cut else exit_code_of(outcomes),
    )
    write_reports(folder)
    return run


def read_suite_head(part: EndedJob, name: str) -> SuiteRecord:
    """Return the record of a suite run that has only this part.

    Args:
        name: ID of the run.

    Raises:
        FarmError: the part's record is invalid.
    """
    with _name_jobs_in_errors([part.name]):
        return _build_head([part], [part.part], Path(name))


def _read_origin(part: EndedJob) -> Origin | None:
    """Return the submission's origin, or None if unknown. Raises FarmError."""
    origin = part.spec.options.get("origin")
    return convert_record(part.name, lambda values: make_record(values, Origin), origin) if origin else None


def _build_head(parts: Sequence[EndedJob], heads: Sequence[SuitePart], folder: Path) -> SuiteRecord:
    options = parts[0].spec.options
    typed = options["typed"]
    asked = replace(
        rebuild_request(options), source=typed["source"], flow=typed["flow"], filters=tuple(typed["filters"])
    )
    listed = [case[0] for part in parts for case in part.spec.options["cases"]]
    all_ids = next((head.suite_ids for head in heads if head.suite_ids), listed)
    order = {case_id: number for number, case_id in enumerate(all_ids)}
    request = asked.to_json()
    return SuiteRecord(
        schema=1,
        id=folder.name,
        request=request,
        source=typed["source"],
        place=typed.get("place", ""),
        suite=typed["suite"],
        flow=typed["flow_name"],
        runtime=typed["runtime"],
        boards=sorted({board for head in heads for board in head.boards}),
        board_info={board: info for head in heads for board, info in head.board_info.items()},
        command="",
        versions=next((head.versions for head in heads if head.versions), collect_versions()),
        ids=sorted(listed, key=lambda case_id: order.get(case_id, len(order))),
        suite_ids=all_ids,
        models={name: file for head in heads for name, file in head.models.items()},
        expected=typed["expected"],
        origin=_read_origin(parts[0]) or find_request_origin(request),
        left_out=typed.get("left_out", []),
        interrupted=False,
        started=min((head.started for head in heads if head.started), default=time.time()),
        finished=max((head.finished for head in heads if head.finished), default=time.time()),
        exit_code=None,
    )


def _list_cases(part: EndedJob, run: SuiteRun, request: SuiteRequest) -> Iterable[CaseRecord]:
    """Yield the cases of a part, with paths for this machine instead of the host."""
    ended, was = {}, part.part.folder
    for case in part.part.cases or ():
        # The texts contain the run directory's path on the host. Replace it with the path of the downloaded directory.
        hint, diff = (_replace_folder(text, was, run.folder) for text in (case.hint, case.diff))
        ended[case.id] = case.replace(repeat=request.command(case.id), hint=hint, diff=diff)
    cancelled = part.result.exit_code == EXIT_INTERRUPTED
    for planned in part.spec.options["cases"]:
        if planned[0] in ended:
            yield ended[planned[0]]
        elif not cancelled:
            yield _make_lost_record(planned, part.result, run, request)


def _replace_folder(text: str, was: str, folder: Path) -> str:
    """Replace the path of the host's run directory at the start of paths in a text.

    This function keeps a path with fewer than two directories, such as ``/``, because it would match many unrelated
    paths.
    """
    if not was.startswith("/") or len(PurePosixPath(was).parts) < 3 or was not in text:
        return text
    return re.sub(f"{_BEFORE_PATH}{re.escape(was)}{_AFTER_PATH}", lambda _: str(folder), text, count=_MAX_REPLACED)


def _make_lost_record(case: Sequence[str], result: JobResult, run: SuiteRun, request: SuiteRequest) -> CaseRecord:
    """Return the record of a case without a result."""
    known = {outcome.value for outcome in Outcome if outcome.exit_code}
    outcome = result.outcome if result.outcome in known and not result.infrastructure else Outcome.BOARD_LOST.value
    case_id, model, layer, op = case
    message, repeat = result.reason or "the job has no result", request.command(case_id)
    return CaseRecord(
        id=case_id,
        model=model,
        layer=layer,
        op=op,
        suite=run.head.suite,
        flow=run.head.flow,
        runtime=run.head.runtime,
        started=run.head.started,
        outcome=outcome,
        ended=outcome,
        message=message,
        repeat=repeat,
    )

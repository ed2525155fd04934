"""Attempt at a job: fetch the files, call the library like the commands do, and upload the results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import filelock

from hil.controller.farm.host.jobs.job_programs import copy_programs
from hil.controller.farm.host.jobs.job_transfer import FileCache, retry_until_reachable, upload_folder
from hil.controller.farm.host.lease_runner import REASON, Attempt
from hil.controller.farm.job_files import KEEP_PROGRAMS, find_key, find_profiles, rebuild_job, request_of
from hil.controller.farm.messages import JobResult, Kind
from hil.controller.records.base import make_record
from hil.controller.records.outputs import Origin
from hil.controller.records.run import RunRecord
from hil.controller.records.suite import SuiteDocument
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.sources.origin import use_origin
from hil.core.files import MAX_MODEL_BYTES, read_file, write_atomic
from hil.core.results import Outcome, exit_code_of
from hil.core.runtimes import RUNTIMES, can_load_onnx
from hil.errors import EXIT_BOARD

T = TypeVar("T")


@dataclass
class LineProgress:
    """Progress of a run or a suite, printed as lines."""

    print: Callable[[str], None]
    case_ended: Callable[[str, str, str], None] = lambda name, outcome, reason: None

    def begin(self, name: Any, stages: Any) -> None:
        """Handle the start of a case or a suite."""
        if isinstance(name, int):
            self.print(f"{name} cases")

    def stage(self, name: str, number: int, text: str) -> None:
        """Handle a new stage of a case."""
        self.print(f"{name}: {text}")

    def end(self, name: Any, outcome: str = "", reason: str = "") -> None:
        """Handle the end of a case."""
        if isinstance(name, str):
            self.case_ended(name, outcome, reason)
        else:
            self.print(f"{name.id}: {name.outcome}")
            self.case_ended(name.id, name.outcome, name.message)

    def note(self, text: str) -> None:
        """Print a note."""
        self.print(text)

    def interrupt(self, command: str) -> None:
        """Ignore the command, because it can resume the work only on this host."""


def use_board(attempt: Attempt) -> JobResult:
    """Run the job and upload the results. Waits for a farm that is temporarily unavailable."""
    spec, timed, farm = attempt.grant.spec, attempt.measure_step, attempt.farm
    if spec.kind is Kind.HEALTH:
        return check_health(attempt)
    work, out = attempt.folder / "files", attempt.folder / "out"
    work.mkdir(parents=True)
    with timed("fetch"):
        retry_until_reachable(lambda: FileCache(attempt.site.files).lay_out(spec, work, farm()))
    with timed("run"), use_origin(make_record(spec.options.get("origin") or _NO_ORIGIN, Origin)):
        record, place = _execute_job(attempt, work, out)
        if spec.options.get(KEEP_PROGRAMS) and record.cases:
            copy_programs(place, attempt.print)
    with timed("upload"):
        stored = retry_until_reachable(lambda: upload_folder(place, farm()))
    for case in record.cases if isinstance(record, RunRecord) else ():
        attempt.print(f"{case.name}: {case.outcome and case.outcome.value} {case.reason}".strip())
    return _build_result(record, stored)


def _execute_job(attempt: Attempt, work: Path, out: Path) -> tuple[RunRecord | SuiteDocument, Path]:
    """Run the job. Returns the record and the run directory."""
    options, progress = attempt.grant.spec.options, LineProgress(attempt.print, attempt.case_ended)
    if attempt.grant.spec.kind is Kind.SUITE:
        from hil.controller.workloads.suites.job import run_suite

        request = replace(request_of(options, work), boards=(attempt.board.name,), hw_type="", ssh={})
        suite = run_suite(request, out=out, screen=progress, isolated=attempt.isolated, choices=[attempt.board])
        return suite.to_document(), suite.folder
    job = replace(rebuild_job(options, work), board=attempt.board.name, out=out)
    if attempt.grant.spec.kind is Kind.BUNDLE:
        from hil.controller.workloads.bundles.run import run_bundle

        methods, key = tuple(options.get("methods", ())), find_key(options, work)
        record = run_bundle(job, methods, key, screen=progress, isolated=attempt.isolated, choice=attempt.board)
    else:
        from hil.controller.workloads.run_job import run_job

        how: dict[str, Any] = {"isolated": attempt.isolated, "choice": attempt.board}
        record = run_job(job, screen=progress, profiles=find_profiles(options), **how)
    if not record.folder:  # the board refused the session, so no directory was created
        out.mkdir(exist_ok=True)
    return record, Path(record.folder or out)


def _build_result(record: RunRecord | SuiteDocument, stored: Mapping[str, str]) -> JobResult:
    if isinstance(record, RunRecord):
        cases = [(case.name, case.outcome, case.reason) for case in record.cases]
    else:
        cases = [(case.id, Outcome(case.outcome), case.message) for case in record.cases]
    code = record.exit_code or 0
    worst = (case for case in cases if case[1] and exit_code_of([case[1]]) == code)
    name, outcome, reason = next(worst, ("", None, ""))
    return JobResult(
        code,
        outcome.value if outcome else "",
        f"{name}: {reason}"[:REASON] if outcome and code else "",
        infrastructure=code == EXIT_BOARD,
        record=record.to_json(),
        files=dict(stored),
    )


_NO_ORIGIN = {"labels": [], "branch": "", "commit": ""}
_MAKE_SECONDS = 60.0
# Timeout for loading and for running a check's model.
_CHECK_RUN_SECONDS = 20.0


def check_health(attempt: Attempt) -> JobResult:
    """Run a health job: check the board's requirements, and compare a model's outputs.

    Without a program for the board's runtime, this function checks only the requirements. The model is cached in the
    host's directory.
    """
    from hil.controller.pipeline.settings.options import Job
    from hil.controller.workloads.board_needs import check_needs
    from hil.controller.workloads.run_job import run_job

    runtime, board = attempt.runtime, attempt.board
    is_large = check_needs(board, runtime, attempt.folder, attempt.print)
    if not can_load_onnx(runtime):
        return JobResult(0, "PASS", f"the board responds; hil has no test program for {runtime}")
    model = _get_check_model(attempt.site.folder, attempt.isolated, attempt.folder, weights=is_large)
    job = Job((model,), board=board.name, out=attempt.folder / "out", timeout=_CHECK_RUN_SECONDS)
    record = run_job(job, screen=LineProgress(attempt.print), isolated=attempt.isolated, choice=board)
    (case,) = record.cases
    outcome = case.outcome.value if case.outcome else ""
    if case.outcome is Outcome.COMPILE_ERROR and runtime not in RUNTIMES:
        # A package's compiler may not support the operators of the model. This is not the board's fault.
        return JobResult(0, "PASS", f"the board responds; the compiler for {runtime} refuses hil's test program")
    reason = "" if record.exit_code == 0 else f"small test model: {outcome}: {case.reason}"
    return JobResult(record.exit_code or 0, outcome, reason, record=record.to_json())


def make_model(path: str, weights: bool) -> None:
    """Write the model. Runs in a worker process, so that this process does not load the libraries."""
    from hil.controller.workloads.board_needs import write_model

    write_model(Path(path), weights=weights)


def _get_check_model(kept: Path, isolated: Isolated, folder: Path, *, weights: bool) -> Path:
    path = kept / ("small.onnx" if weights else "tiny.onnx")
    if path.exists():
        return path
    # At startup, the workers of a host check all boards. The first worker creates the model, and the others wait. If
    # the wait takes too long, each worker creates the model.
    lock = filelock.FileLock(f"{path}.lock")
    with contextlib.suppress(filelock.Timeout):
        lock.acquire(timeout=_MAKE_SECONDS)
    try:
        if not path.exists():
            made = folder / path.name
            arguments = {"path": str(made), "weights": weights}
            isolated.call(make_model, arguments, timeout=_MAKE_SECONDS, log=folder / "log")
            write_atomic(path, read_file(made, MAX_MODEL_BYTES))
    finally:
        lock.release()
    return path

"""Matrices of suites, models, bundles and traces. A target is a separate stored run."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from hil.controller.pipeline.settings.options import Job
from hil.controller.pipeline.stages import choose_board
from hil.controller.records.matrix import MatrixKind
from hil.controller.records.run import RunRecord
from hil.controller.storage import run_context
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.runs import RECORD, make_id
from hil.controller.storage.session_folders import DEFAULT_ROOT
from hil.controller.workloads.bundles.run import run_bundle
from hil.controller.workloads.matrix.job import Matrix
from hil.controller.workloads.matrix.report import MatrixReport
from hil.controller.workloads.matrix.targets import MatrixTarget
from hil.controller.workloads.run_job import run_job
from hil.controller.workloads.suites.job import SuiteProgress, check_request, resume_suite, run_suite
from hil.controller.workloads.suites.request import SuiteRequest
from hil.controller.workloads.suites.store import HEAD as SUITE
from hil.controller.workloads.suites.store import choose_default_folder
from hil.controller.workloads.traces.run import run_trace
from hil.controller.workloads.traces.stored import find_one
from hil.controller.workloads.triage.entries import TriageList
from hil.core.results import Outcome
from hil.core.text import convert_to_json, make_names_unique
from hil.errors import BoardError, BoardRefused, BoardUnreachable, UsageError

# Directory and report of a matrix.
Done = tuple[Path, MatrixReport]
_UNREACHED = (BoardRefused, BoardUnreachable)
_UNREACHED_OUTCOMES: dict[Outcome | None, type[BoardError]] = {Outcome(one.outcome): one for one in _UNREACHED}


def run_suite_matrix(
    request: SuiteRequest,
    targets: Sequence[MatrixTarget],
    *,
    out: Path | None,
    screen: SuiteProgress,
    known: TriageList | None = None,
) -> Done:
    """Run a suite on all targets.

    Args:
        request: the common settings of the targets.
        out: the matrix's directory; None creates one in ``hil-suites``.
        known: triage of failures. Known failures do not fail a suite.

    Raises:
        UsageError: the request is invalid; nothing was run.
        HilError, KeyboardInterrupt: see :meth:`Matrix.run`.
    """
    for target in targets:
        check_request(_build_request(request, target))
    title = Path(request.source).name or request.source
    folder = out or choose_default_folder(title, "matrix")
    command = shlex.join(["hil", "suite", "run", "--resume", str(folder)])
    matrix = Matrix.create(folder, "suite", title, request.to_json(), targets, command)
    return _run_suites(matrix, screen, known)


def resume_suite_matrix(folder: Path, *, screen: SuiteProgress, known: TriageList | None = None) -> Done:
    """Resume a matrix of suites. Raises the errors of :meth:`Matrix.open` and :meth:`Matrix.run`."""
    return _run_suites(Matrix.open(folder, "suite"), screen, known)


def _run_suites(matrix: Matrix, screen: SuiteProgress, known: TriageList | None) -> Done:
    try:
        request = SuiteRequest.from_json(matrix.head.request)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"cannot resume {matrix.folder}: {error}", hint="start a new run") from error
    with _share_workers(None if request.on_farm else request.jobs) as workers:

        def run(target: MatrixTarget, folder: Path) -> None:
            if (folder / SUITE).exists():
                resume_suite(folder, screen=screen, isolated=workers(), known=known)
            else:
                run_suite(_build_request(request, target), out=folder, screen=screen, isolated=workers(), known=known)

        return matrix.folder, matrix.run(run, say=screen.note)


def _build_request(request: SuiteRequest, target: MatrixTarget) -> SuiteRequest:
    """Return a target's request."""
    options: dict[str, Any] = dict(target.options)
    if board := options.pop("board", ""):
        options["boards"] = (board,)
    return request.for_target(target.name, **options)


def run_job_matrix(job: Job, targets: Sequence[MatrixTarget], *, screen: run_context.Progress) -> Done:
    """Run models on all targets, as :func:`run_suite_matrix` does. The matrix is stored in ``job.out``."""
    if not job.models and not job.flagfile:
        raise UsageError("missing argument MODEL", hint="hil run MODEL, or hil run --help")
    return _run_jobs(_create_matrix("run", job, targets, "hil run"), screen)


def resume_job_matrix(folder: Path, *, screen: run_context.Progress) -> Done:
    """Resume a matrix of models. Raises the errors of :meth:`Matrix.open` and :meth:`Matrix.run`."""
    return _run_jobs(Matrix.open(folder, "run"), screen)


def _run_jobs(matrix: Matrix, screen: run_context.Progress) -> Done:
    with _share_workers() as workers:

        def run(target: MatrixTarget, folder: Path) -> RunRecord:
            begun = (folder / RECORD).exists()
            job, resume = (Job(out=matrix.folder), str(folder)) if begun else (_build_job(matrix, target), "")
            return run_job(job, resume=resume, run_id=target.name, screen=screen, isolated=workers())

        return matrix.folder, matrix.run(_raise_if_unreached(run), say=screen.note)


def run_bundle_matrix(
    job: Job,
    targets: Sequence[MatrixTarget],
    methods: tuple[str, ...],
    key: Path | None,
    *,
    cases: tuple[str, ...] = (),
    screen: run_context.Progress,
) -> Done:
    """Run a bundle on all targets, as :func:`run_job_matrix` does."""
    matrix = _create_matrix("bundle", job, targets, "")
    return _run_files(matrix, partial(run_bundle, methods=methods, key=key, cases=cases), screen)


def trace_matrix(
    job: Job, targets: Sequence[MatrixTarget], against: Path | None, *, screen: run_context.Progress
) -> Done:
    """Replay a stored trace on all targets, as :func:`run_job_matrix` does."""
    # Resolve run IDs now, because the targets use another directory for their runs.
    job = replace(job, models=tuple(find_one(place, job.out) for place in job.models))
    against = find_one(against, job.out) if against is not None else None
    return _run_files(_create_matrix("trace", job, targets, ""), partial(run_trace, against=against), screen)


def _run_files(matrix: Matrix, run_file: Callable[..., RunRecord], screen: run_context.Progress) -> Done:
    with _share_workers(1) as workers:

        def run(target: MatrixTarget, folder: Path) -> RunRecord:
            return run_file(_build_job(matrix, target), run_id=target.name, screen=screen, isolated=workers())

        return matrix.folder, matrix.run(_raise_if_unreached(run), say=screen.note)


def _create_matrix(kind: MatrixKind, job: Job, targets: Sequence[MatrixTarget], command: str) -> Matrix:
    for target in targets:
        choose_board(_apply_target(job, target), takes_ranges=True)
    names = make_names_unique([path.stem for path in job.models]) or [job.flagfile.stem if job.flagfile else ""]
    title = names[0] if len(names) == 1 else f"{len(names)} models"
    name = make_id(f"{title.replace(' ', '-')}-matrix")
    folder = (job.out or DEFAULT_ROOT) / name
    resume = shlex.join([*command.split(), "--resume", str(folder)]) if command else ""
    return Matrix.create(folder, kind, title, convert_to_json(asdict(job)), targets, resume)


def _build_job(matrix: Matrix, target: MatrixTarget) -> Job:
    """Return a target's job. The run is stored in the matrix's directory."""
    try:
        job = Job.from_record(matrix.head.request)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"cannot resume {matrix.folder}: {error}", hint="start a new run") from error
    return replace(_apply_target(job, target), out=matrix.folder)


def _apply_target(job: Job, target: MatrixTarget) -> Job:
    options: dict[str, Any] = dict(target.options)
    for name in ("profile", "compile_time_profile", "debug_ir"):
        if (folder := getattr(job, name)) is not None:
            options[name] = folder / target.name
    return replace(job, **options)


def _raise_if_unreached(run: Callable[[MatrixTarget, Path], RunRecord]) -> Callable[[MatrixTarget, Path], object]:
    """Wrap a function: if its run never reached the board, raise the board's error. Such runs are not stored."""

    def run_target(target: MatrixTarget, folder: Path) -> object:
        record = run(target, folder)
        if not record.folder:
            case, error = next(
                (case, _UNREACHED_OUTCOMES[case.outcome])
                for case in record.cases
                if case.outcome in _UNREACHED_OUTCOMES
            )
            raise error(case.reason, hint=case.error.hint if case.error else "")
        return record

    return run_target


@contextlib.contextmanager
def _share_workers(count: int | None = None) -> Iterator[Callable[[], Isolated]]:
    """Yield a function that returns the shared worker pool.

    If an aborted target closed the pool, the function creates a new pool.
    """
    pools: list[Isolated] = []

    def get_workers() -> Isolated:
        if not pools or pools[-1].closed:
            pools.append(Isolated(count))
        return pools[-1]

    try:
        yield get_workers
    finally:
        for pool in pools:
            pool.close()

"""What a matrix is made over: suites, models, bundles. Each target is an ordinary run, which could be gone on with."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from hil.controller.pipeline.options import Job
from hil.controller.pipeline.stages import choice_of
from hil.controller.storage import run_context
from hil.controller.storage.isolated import Isolated
from hil.controller.storage.runs import DEFAULT_ROOT, RECORD, new_id
from hil.controller.workloads.bundles.run import run_bundle
from hil.controller.workloads.matrix.job import Matrix
from hil.controller.workloads.matrix.report import MatrixReport
from hil.controller.workloads.matrix.targets import Target
from hil.controller.workloads.run_job import run_job
from hil.controller.workloads.suites.job import Progress, check_request, resume_suite, run_suite
from hil.controller.workloads.suites.request import Request
from hil.controller.workloads.suites.store import HEAD as SUITE
from hil.controller.workloads.suites.store import default_folder
from hil.controller.workloads.traces.run import run_trace
from hil.controller.workloads.traces.stored import find_one
from hil.core.text import jsonable, numbered
from hil.errors import BoardError, BoardRefused, BoardUnreachable, UsageError

# A matrix in its folder, and its report.
Done = tuple[Path, MatrixReport]
_NEVER_IN: dict[str, type[BoardError]] = {str(one.outcome): one for one in (BoardRefused, BoardUnreachable)}


def suite_matrix(request: Request, targets: Sequence[Target], *, out: Path | None, screen: Progress) -> Done:
    """Run a suite on every target.

    Args:
        request: what the targets have in common.
        out: the matrix' folder; None makes one below ``hil-suites``.

    Raises:
        UsageError: something was asked for that cannot be; nothing was run.
        HilError, KeyboardInterrupt: as :meth:`Matrix.run`.
    """
    for target in targets:
        check_request(_request_of(request, target))
    title = Path(request.source).name or request.source
    folder = out or default_folder(title, "matrix")
    command = shlex.join(["hil", "suite", "run", "--resume", str(folder)])
    matrix = Matrix.create(folder, "suite", title, jsonable(request.to_json()), targets, command)
    return _run_suites(matrix, screen)


def resume_suite_matrix(folder: Path, *, screen: Progress) -> Done:
    """Go on with a matrix of suites. Raises as :meth:`Matrix.open` and :meth:`Matrix.run`."""
    return _run_suites(Matrix.open(folder, "suite"), screen)


def _run_suites(matrix: Matrix, screen: Progress) -> Done:
    try:
        request = Request.of_json(matrix.head["request"])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{matrix.folder} cannot be gone on with: {error}", hint="start a new run") from error
    with _workers(None if request.on_farm else request.jobs) as workers:

        def run(target: Target, folder: Path) -> None:
            if (folder / SUITE).exists():
                resume_suite(folder, screen=screen, isolated=workers())
            else:
                run_suite(_request_of(request, target), out=folder, screen=screen, isolated=workers())

        return matrix.folder, matrix.run(run, say=screen.note)


def _request_of(request: Request, target: Target) -> Request:
    """What a target is asked."""
    options: dict[str, Any] = dict(target.options)
    if board := options.pop("board", ""):
        options["boards"] = (board,)
    return request.for_target(target.name, **options)


def job_matrix(job: Job, targets: Sequence[Target], *, screen: run_context.Progress) -> Done:
    """Run models on every target, as :func:`suite_matrix`; below ``job.out``, where runs are stored."""
    if not job.models and not job.flagfile:
        raise UsageError("no MODEL was named", hint="hil run MODEL, or hil run --help")
    return _run_jobs(_created("run", job, targets, "hil run"), screen)


def resume_job_matrix(folder: Path, *, screen: run_context.Progress) -> Done:
    """Go on with a matrix of models. Raises as :meth:`Matrix.open` and :meth:`Matrix.run`."""
    return _run_jobs(Matrix.open(folder, "run"), screen)


def _run_jobs(matrix: Matrix, screen: run_context.Progress) -> Done:
    with _workers() as workers:

        def run(target: Target, folder: Path) -> dict[str, Any]:
            begun = (folder / RECORD).exists()
            job, resume = (Job(out=matrix.folder), str(folder)) if begun else (_job_of(matrix, target), "")
            return run_job(job, resume=resume, run_id=target.name, screen=screen, isolated=workers())

        return matrix.folder, matrix.run(_reached(run), say=screen.note)


def bundle_matrix(
    job: Job,
    targets: Sequence[Target],
    methods: tuple[str, ...],
    key: Path | None,
    *,
    cases: tuple[str, ...] = (),
    screen: run_context.Progress,
) -> Done:
    """Run a bundle on every target, as :func:`job_matrix`."""
    matrix = _created("bundle", job, targets, "")
    return _run_one(matrix, partial(run_bundle, methods=methods, key=key, cases=cases), screen)


def trace_matrix(job: Job, targets: Sequence[Target], against: Path | None, *, screen: run_context.Progress) -> Done:
    """Make a stored trace's calls again on every target, as :func:`job_matrix`."""
    # A run's ID says nothing where the targets' own runs are stored.
    job = replace(job, models=tuple(find_one(place, job.out) for place in job.models))
    against = find_one(against, job.out) if against is not None else None
    return _run_one(_created("trace", job, targets, ""), partial(run_trace, against=against), screen)


def _run_one(matrix: Matrix, run_file: Callable[..., dict[str, Any]], screen: run_context.Progress) -> Done:
    with _workers(1) as workers:

        def run(target: Target, folder: Path) -> dict[str, Any]:
            return run_file(_job_of(matrix, target), run_id=target.name, screen=screen, isolated=workers())

        return matrix.folder, matrix.run(_reached(run), say=screen.note)


def _created(kind: str, job: Job, targets: Sequence[Target], command: str) -> Matrix:
    for target in targets:
        choice_of(_of_target(job, target), takes_ranges=True)
    names = numbered([path.stem for path in job.models]) or [job.flagfile.stem if job.flagfile else ""]
    title = names[0] if len(names) == 1 else f"{len(names)} models"
    name = new_id(f"{title.replace(' ', '-')}-matrix")
    folder = (job.out or DEFAULT_ROOT) / name
    resume = shlex.join([*command.split(), "--resume", str(folder)]) if command else ""
    return Matrix.create(folder, kind, title, jsonable(asdict(job)), targets, resume)


def _job_of(matrix: Matrix, target: Target) -> Job:
    """What a target is asked; its run is stored below the matrix' folder."""
    try:
        job = Job.of_record(matrix.head["request"])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{matrix.folder} cannot be gone on with: {error}", hint="start a new run") from error
    return replace(_of_target(job, target), out=matrix.folder)


def _of_target(job: Job, target: Target) -> Job:
    options: dict[str, Any] = dict(target.options)
    for name in ("profile", "compile_time_profile", "debug_ir"):
        if (folder := getattr(job, name)) is not None:
            options[name] = folder / target.name
    return replace(job, **options)


def _reached(run: Callable[[Target, Path], dict[str, Any]]) -> Callable[[Target, Path], object]:
    """A run that never came to its board is not kept: its error is the target's."""

    def reached(target: Target, folder: Path) -> object:
        record = run(target, folder)
        if not record["folder"]:
            case = next(case for case in record["cases"] if case["outcome"] in _NEVER_IN)
            raise _NEVER_IN[case["outcome"]](case["reason"], hint=(case["error"] or {}).get("hint", ""))
        return record

    return reached


@contextlib.contextmanager
def _workers(count: int | None = None) -> Iterator[Callable[[], Isolated]]:
    """Processes that targets share; new ones where a target that was broken off has stopped them."""
    pools: list[Isolated] = []

    def workers() -> Isolated:
        if not pools or pools[-1].closed:
            pools.append(Isolated(count))
        return pools[-1]

    try:
        yield workers
    finally:
        for pool in pools:
            pool.close()

"""Run a job from the first check to the stored record. This implements `hil run`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from msgspec import UNSET

from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice, use_device
from hil.controller.models.default_inputs import add_given_defaults
from hil.controller.models.importers import import_model
from hil.controller.pipeline.boards.board_pool import BoardPool
from hil.controller.pipeline.case import Case, ProgressSink
from hil.controller.pipeline.records.print_generation import describe_texts
from hil.controller.pipeline.records.record import Recorder, record_board
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.flagfiles import read_flagfile
from hil.controller.pipeline.settings.given_inputs import describe_inputs_file
from hil.controller.pipeline.settings.options import Job
from hil.controller.pipeline.stages import STAGES, check_device_is_used, choose_board, needs_compiler
from hil.controller.pipeline.verdicts.accepting import check_accepted_outputs
from hil.controller.records.run import RunCase, RunRecord
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated, lend_pool
from hil.controller.storage.paths import is_file
from hil.controller.storage.run_context import Progress, RunContext
from hil.controller.storage.runs import PROFILE_FOLDERS, Run, RunStore, check_seal, make_safe_name
from hil.controller.workloads.sized_cases import FailureSearch, SizedCase, format_failure, list_sized_cases
from hil.core.results import Outcome, Stage
from hil.core.text import convert_to_json, make_names_unique
from hil.errors import HilError, StorageError, UsageError

# Kind of profile -> field of the job with its directory.
_PROFILE_FIELDS = {"compile": "compile_time_profile", "run": "profile"}


def run_job(
    job: Job,
    *,
    resume: str = "",
    run_id: str = "",
    screen: Progress,
    isolated: Isolated | None = None,
    choice: BoardChoice | None = None,
    profiles: Collection[str] = (),
) -> RunRecord:
    """Run a job and store results as they arrive.

    Args:
        job: the job. With ``resume``, only ``out`` is used.
        resume: ID of an interrupted run. Only cases without an outcome run.
        run_id: the run's ID if the run is part of a larger workload, which resumes it; otherwise "".
        isolated: a pool of workers to use. The pool outlives the job unless the job is aborted. None creates a pool.
        choice: the board. None selects the job's board.
        profiles: kinds of profiles, ``run`` and ``compile``, to store in the cases' directories instead of the
            directories of the job.

    Returns:
        The run's record (the schema of docs/run.schema.json) with ``folder``, the run's directory.

    Raises:
        UsageError: the request is invalid; nothing was compiled or run.
        KeyboardInterrupt: Ctrl-C; partial results are stored.
    """
    store = RunStore(job.out)
    run: Run | None = None
    if resume:
        if job.models:
            raise UsageError("--resume uses the models of the stored run: omit MODEL")
        run = store.open(resume)
        if (run.folder / "bench.json").exists():
            raise UsageError(f"cannot resume benchmark {run.id}", hint=f"repeat it with: hil bench --against {run.id}")
        if (run.folder / "eval.json").exists():
            raise UsageError(f"cannot resume evaluation {run.id}", hint=f"use: hil eval --resume {run.id}")
        check_seal(run.folder, run.record.request)
        job = replace(Job.from_record(run.record.request), out=job.out)
    if job.flagfile:
        job = read_flagfile(job)
    if not job.models:
        raise UsageError("missing argument MODEL", hint="hil run MODEL, or hil run --help")
    choice = use_device(choice, job.runtime, job.device) if choice else choose_board(job, takes_ranges=True)
    if profiles:
        named: dict[str, Any] = {_PROFILE_FIELDS[kind]: Path(PROFILE_FOLDERS[kind]) for kind in profiles}
        job = replace(job, **named)
    else:
        _check_profiles(job)
    with lend_pool(isolated) as workers:
        context = RunContext(Cache(), workers)
        planned = list_sized_cases(job, replace(job.make_options(), inputs=tuple(job.inputs)), context)
        kept = {case.name: case for case in run.record.cases if case.outcome} if run else {}
        changed: set[str] = set()
        for one in planned:
            if one.name in kept and _has_changed(kept[one.name], one, context):
                what = "the model, the specification or the reference" if one.options.generate else "the model"
                screen.note(f"rerunning {one.name}: {what} changed")
                del kept[one.name]
                changed.add(str(one.path))
        if run is not None and changed:
            # Forget the cases of an earlier search for the smallest failing sizes, because the search may choose other
            # sizes now.
            names = {one.name for one in planned}
            kept = {name: case for name, case in kept.items() if name in names or case.path not in changed}
            run.record.cases = [case for case in run.record.cases if case.name in kept or case.name in names]
            run.record.smallest_failing = UNSET

        def begin(one: SizedCase) -> Case:
            try:
                case = Runner(context).begin(one.path, one.options, Path(), name=one.name)
            except UsageError as error:
                if len(job.models) == 1:
                    raise
                raise UsageError(f"{one.path}: {error.message}", hint=error.hint) from error
            if note := describe_inputs_file(one.options, case.options, one.path):
                screen.note(note)
            return case

        # Import before storing anything, because the import may detect an invalid command line.
        cases = [begin(one) for one in planned if one.name not in kept]
        if run is None:
            check_accepted_outputs((case.options.accept, case.model) for case in cases)
        running = [case for case in cases if not case.outcome]
        for case in running:
            check_device_is_used(case, choice.config)
        runtimes = [case.options.runtime for case in running] or [job.runtime]
        title = planned[0].model if len(job.models) == 1 else f"{len(job.models)}-models"
        stored = run or store.create(title, convert_to_json(asdict(job)), run_id)
        search = FailureSearch(planned)

        def report(outcomes: Mapping[str, Outcome]) -> None:
            if found := list(search.iter_smallest(outcomes)):
                stored.record.smallest_failing = found
            for text in (*map(format_failure, found), *describe_texts(stored.record.cases)):
                screen.note(text)

        return run_cases(
            stored,
            job,
            choice,
            cases,
            context,
            screen,
            order=list(dict.fromkeys([*(one.name for one in planned), *kept])),
            runtimes=runtimes,
            purpose=f"hil run {stored.id}",
            resumable=not run_id,
            after=lambda case: _write_profiles(case, job, stored, context, in_run=bool(profiles)),
            more=lambda outcomes: [begin(one) for one in search.choose_next_cases(outcomes)],
            report=report,
        )


def _has_changed(record: RunCase, one: SizedCase, context: RunContext) -> bool:
    """Return whether a finished case's model or generation has changed. If the model file is missing, return False.

    Raises:
        UsageError: the specification of a generation has become invalid.
    """
    was, options = record.model and record.model.digest, one.options
    if options.generate is not None and was is not None and is_file(one.path):
        from hil.controller.pipeline.records.generation import digest_generation

        return record.generation_digest != digest_generation(Runner(context).begin(one.path, options, Path()))
    work: dict[str, Any] = {"isolated": context.isolated, "cache": context.cache}
    try:
        model = import_model(one.path, function=options.function, dims=options.dims, **work)
        return bool(was != add_given_defaults(model, options.inputs, context)[0].digest)
    except UsageError:
        return False
    except HilError:
        return was is not None


def _check_profiles(job: Job) -> None:
    """Raise UsageError for unusable profile directories before anything runs."""
    if job.profile is not None and job.profile == job.compile_time_profile:
        raise UsageError("--profile and --compile-time-profile require different directories")
    names = make_names_unique([make_safe_name(path.stem) for path in job.models])
    for name in names if not job.dim_ranges else [""]:
        for kind, folder in _profile_folders(job, name).items():
            from hil.controller.analysis.profile.collect import check_folder

            check_folder(folder, kind)


def _profile_folders(job: Job, case: str) -> dict[str, Path]:
    """Return the directory for every kind of profile of a case."""
    kinds: dict[str, Path | None] = {kind: getattr(job, name) for kind, name in _PROFILE_FIELDS.items()}
    several = len(job.models) > 1 or job.dim_ranges or job.generate
    return {kind: folder / case if several else folder for kind, folder in kinds.items() if folder}


def _write_profiles(case: Case, job: Job, run: Run, context: RunContext, *, in_run: bool) -> Iterator[Case]:
    """Write the requested profiles.

    Yield the case with the data of every profile, as soon as the profile is complete.

    Args:
        in_run: True to write to the case's directory. The names in the record are then relative to the run's directory.
    """
    if wanted := _profile_folders(job, case.name):
        from hil.controller.analysis.profile.collect import write_profiles

        if in_run:
            wanted = {kind: case.folder / PROFILE_FOLDERS[kind] for kind in wanted}
        for profiles in write_profiles(case, wanted, run_id=run.id, context=context):
            if in_run:
                profiles = tuple(one.replace(folder=str(Path(one.folder).relative_to(run.folder))) for one in profiles)
            yield replace(case, profiles=profiles)


def run_cases(
    run: Run,
    job: Job,
    choice: BoardChoice,
    cases: Sequence[Case],
    context: RunContext,
    screen: Progress,
    *,
    order: Sequence[str] = (),
    runtimes: Sequence[str],
    purpose: str,
    most_loaded: int = 0,
    resumable: bool = False,
    after: Callable[[Case], Iterable[Case]] = lambda case: (),
    more: Callable[[Mapping[str, Outcome]], Sequence[Case]] = lambda outcomes: (),
    report: Callable[[Mapping[str, Outcome]], None] = lambda outcomes: None,
) -> RunRecord:
    """Run cases on a board and store the run's record.

    Args:
        order: all case names in the run, including those that ended before. Empty means the names of ``cases``.
        runtimes: the runtimes of the cases; "" is the board's default.
        purpose: text shown to other users who wait for the board.
        most_loaded: maximum number of programs that stay loaded on the board between cases.
        resumable: whether an interrupted run can be resumed.
        after: called with a finished case once the outcome is stored. Yields updated versions of the case.
        more: called when no cases are left, with the outcomes of all finished cases by name. Returns further cases;
            an empty result ends the run.
        report: called with the outcomes of all cases after the last case.

    Returns:
        The run's record with ``folder``, the run's directory.

    Raises:
        UsageError: the board rejected the request. A new run without a finished case is deleted.
        KeyboardInterrupt: Ctrl-C; partial results are stored.
    """
    is_new = not run.record.cases

    def place_cases(cases: Iterable[Case]) -> list[Case]:
        made = [replace(case, folder=run.make_case_folder(case.name)) for case in cases]
        for case in made:
            screen.begin(case.name, len(STAGES))
        return made

    cases = place_cases(cases)
    recorder = Recorder(run, order or [case.name for case in cases], cases)

    def watch(case: Case, stage: Stage, note: str) -> None:
        screen.stage(case.name, STAGES.index(stage), f"{stage.value} {note}".strip())
        if not note:
            recorder.write_soon(case)

    def note_board(board: Board) -> None:
        if board.target and any(needs_compiler(case, board.config) for case in cases):
            screen.note(f"compiling for {board.target}")
        run.record.board = record_board(board)

    runner = Runner(context, sink=ProgressSink(watch, recorder.keep, recorder.write))
    earlier = list(run.record.consoles)
    pool = BoardPool(
        purpose,
        wait_s=job.wait_s,
        timeout_s=job.timeout,
        say=screen.note,
        opened=note_board,
        most_loaded=most_loaded,
        record_folder=run.folder,
    )
    try:
        with pool:
            while True:
                for case in runner.run(cases, pool, choice, runtimes=runtimes, faults=job.faults):
                    screen.end(case.name, case.outcome.value if case.outcome else "", case.reason)
                    run.record.consoles = [*earlier, *pool.save_consoles()]
                    # Store the outcome first: ``after`` may be slow or interrupted by Ctrl-C.
                    recorder.end(case)
                    for changed in after(case):
                        recorder.write(changed)
                cases = place_cases(more(recorder.outcomes))
                if not cases:
                    break
                recorder.add(cases)
            report(recorder.outcomes)
    except StorageError:
        raise
    except UsageError:
        if is_new and not recorder.ended:
            recorder.forget()
            run.discard()
        raise
    except KeyboardInterrupt:
        run.record.consoles = [*earlier, *pool.save_consoles()]
        recorder.interrupt()
        if resumable:
            screen.interrupt(run.resume_command)
        else:
            screen.note(f"interrupted; finished cases are in {run.folder}")
        raise
    run.record.consoles = [*earlier, *pool.save_consoles()]
    return recorder.finish()

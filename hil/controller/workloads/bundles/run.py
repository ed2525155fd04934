"""A bundle on a board: every case of every method in one session, stored as a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hil.bundles.cases import untested
from hil.bundles.signature import sealed
from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_resolver import choose
from hil.controller.pipeline.board_pool import BoardPool
from hil.controller.pipeline.case import Case, ProgressSink
from hil.controller.pipeline.options import Job
from hil.controller.pipeline.record import Recorder
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.stages import STAGES, check_options
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated, lent
from hil.controller.storage.run_context import Progress, RunContext
from hil.controller.storage.runs import RunStore, safe_name
from hil.controller.workloads.bundles.program_case import ProgramCase, open_bundle
from hil.core.results import Stage
from hil.core.scratch import temporary_folder
from hil.core.text import jsonable
from hil.errors import EXIT_NOTHING_RAN, StorageError, UsageError


def run_bundle(
    job: Job, methods: tuple[str, ...], key: Path | None, *, screen: Progress, isolated: Isolated | None = None
) -> dict[str, Any]:
    """Run a bundle's cases, storing everything as it comes.

    Args:
        job: the board and how to run; its one model is the bundle's file. Tolerances go before the cases' own.
        methods: those to run; none are all.
        key: a file of public keys, one of which must have signed it; None takes any bundle.
        isolated: a pool of workers to use, which outlives the job unless that is broken off; None is one of its own.

    Returns:
        The run's record (the schema of docs/run.schema.json) with ``folder``, its place.

    Raises:
        UsageError: it is no bundle, damaged, or something was asked for that cannot be; nothing was run.
        KeyboardInterrupt: Ctrl-C; what there was is stored.
    """
    (path,) = job.models
    bundle = open_bundle(path, key)
    chosen = [bundle.method(name) for name in dict.fromkeys(methods)] or list(bundle.methods)
    job = replace(job, runtime=bundle.program.runtime)
    choice = choose(
        job.board,
        job.hw_type,
        identity=job.identity,
        known_hosts=job.known_hosts,
        accept_new_host_key=job.accept_new_host_key,
    )
    check_options(job.options(), choice)
    if missing := untested(chosen):
        screen.note(missing)
    with lent(isolated, 1) as workers, temporary_folder("hil-bundle-") as folder:
        place = Path(folder)
        (place / "program").mkdir()
        artifact = sealed(bundle.extract(place / "program"), bundle.head, place)
        cases = [
            ProgramCase(path, bundle.digest, method, given, artifact).begin(job.options(), Path())
            for method in chosen
            for given in method.cases
        ]
        return _run(job, choice, path.stem, _named(cases), RunContext(Cache(), workers), screen)


def _named(cases: Sequence[Case]) -> list[Case]:
    """The cases with names that can be folders, each one once."""
    used: set[str] = set()
    named = []
    for case in cases:
        name = stem = safe_name(case.name)
        number = 1
        while name.casefold() in used:
            number += 1
            name = f"{stem}-{number}"
        used.add(name.casefold())
        named.append(replace(case, name=name))
    return named


def _run(
    job: Job, choice: BoardChoice, title: str, cases: Sequence[Case], context: RunContext, screen: Progress
) -> dict[str, Any]:
    stored = RunStore(job.out).create(title, jsonable(asdict(job)))
    cases = [replace(case, folder=stored.case_folder(case.name)) for case in cases]
    recorder = Recorder(stored, [case.name for case in cases], cases)

    def watch(case: Case, stage: Stage, note: str) -> None:
        screen.stage(case.name, STAGES.index(stage), f"{stage.value} {note}".strip())

    def opened(board: Board) -> None:
        stored.record["board"] = {"name": board.name, "hw_type": board.config.hw_type, "info": board.info}

    runner = Runner(context, sink=ProgressSink(watch, recorder.keep, recorder.write))
    # All cases of a method run in the worker that has it.
    pool = BoardPool(f"hil bundle run {stored.id}", wait_s=job.wait_s, say=screen.note, opened=opened, most_loaded=1)
    try:
        with pool:
            for case in cases:
                screen.begin(case.name, len(STAGES))
            for case in runner.run(cases, pool, choice, runtime=job.runtime, faults=job.faults):
                screen.end(case.name)
                recorder.end(case)
    except StorageError:
        raise
    except UsageError:
        # Only the board, or an answer, could tell. Where nothing has ended yet, nothing is to be kept.
        if not recorder.ended:
            stored.discard()
        raise
    except KeyboardInterrupt:
        recorder.interrupt()
        screen.note(f"interrupted; what had ended is in {stored.folder}")
        raise
    if not cases:
        stored.record.update(exit_code=EXIT_NOTHING_RAN, finished=True)
        stored.save()
        return {**stored.record, "folder": str(stored.folder)}
    return recorder.finish()

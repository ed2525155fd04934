"""A bundle on a board: every case of every method in one session, stored as a run."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hil.bundles.cases import untested, with_cases
from hil.bundles.signature import sealed
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.pipeline.options import Job
from hil.controller.pipeline.stages import choice_of
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated, lent
from hil.controller.storage.origin import typed_command
from hil.controller.storage.run_context import Progress, RunContext
from hil.controller.storage.runs import RunStore, safe_name
from hil.controller.workloads.bundles.methods import recorded_random
from hil.controller.workloads.bundles.program_case import ProgramCase, open_bundle
from hil.controller.workloads.run_job import run_cases
from hil.core.scratch import temporary_folder
from hil.core.text import jsonable, numbered
from hil.errors import EXIT_NOTHING_RAN


def run_bundle(
    job: Job,
    methods: tuple[str, ...],
    key: Path | None,
    *,
    cases: tuple[str, ...] = (),
    run_id: str = "",
    screen: Progress,
    isolated: Isolated | None = None,
    choice: BoardChoice | None = None,
) -> dict[str, Any]:
    """Run a bundle's cases, storing everything as it comes.

    Args:
        job: the board and how to run; its one model is the bundle's file. Tolerances go before the cases' own.
        methods, cases: those to run (:func:`hil.bundles.cases.with_cases`); none are all.
        key: as :func:`open_bundle` takes it.
        run_id, isolated, choice: as :func:`hil.controller.workloads.run_job.run_job` takes them.

    Returns:
        The run's record (the schema of docs/run.schema.json) with ``folder``, its place.

    Raises:
        UsageError: it is no bundle, damaged, or something was asked for that cannot be; nothing was run.
        KeyboardInterrupt: Ctrl-C; what there was is stored.
    """
    (path,) = job.models
    bundle = open_bundle(path, key)
    chosen = with_cases([bundle.method(name) for name in dict.fromkeys(methods)] or bundle.methods, cases)
    job = replace(job, runtime=bundle.program.runtime)
    choice = choice or choice_of(job)
    if missing := untested(chosen):
        screen.note(missing)
    with lent(isolated, 1) as workers, temporary_folder("hil-bundle-") as folder:
        place = Path(folder)
        (place / "program").mkdir()
        artifact = sealed(bundle.extract(place / "program"), bundle.head, place)
        runs = [
            ProgramCase(path, bundle.digest, method, given, artifact, recorded_random(bundle.made, method.name)).begin(
                job.options(), Path()
            )
            for method in chosen
            for given in method.cases
        ]
        names = numbered([safe_name(case.name) for case in runs], alike=str.casefold)
        runs = [replace(case, name=name) for case, name in zip(runs, names, strict=True)]
        # Of a target of several the command is that of all.
        run = RunStore(job.out).create(path.stem, jsonable(asdict(job)), run_id, command=typed_command())
        if not runs:
            run.record.update(exit_code=EXIT_NOTHING_RAN, finished=True)
            run.save()
            return {**run.record, "folder": str(run.folder)}
        return run_cases(
            run,
            job,
            choice,
            runs,
            RunContext(Cache(), workers),
            screen,
            runtime=job.runtime,
            purpose=f"hil bundle run {run.id}",
            most_loaded=1,  # all cases of a method run in the worker that has it
        )

"""Run a bundle on a board: all cases of all methods in a session, stored as a run."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from hil.bundles.cases import describe_untested, select_methods
from hil.bundles.signature import add_seal
from hil.controller.devices.board_choice import BoardChoice, use_device
from hil.controller.pipeline.settings.options import Job
from hil.controller.pipeline.stages import choose_board
from hil.controller.records.run import RunRecord
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated, lend_pool
from hil.controller.storage.run_context import Progress, RunContext
from hil.controller.storage.runs import RunStore, make_safe_name
from hil.controller.storage.sources.origin import get_typed_command
from hil.controller.workloads.bundles.methods import read_random_record
from hil.controller.workloads.bundles.program_case import ProgramCase, open_bundle
from hil.controller.workloads.run_job import run_cases
from hil.core.scratch import make_temporary_folder
from hil.core.text import convert_to_json, make_names_unique
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
) -> RunRecord:
    """Run a bundle's cases and store results as they arrive.

    Args:
        job: the board and the run settings. The only model is the bundle's file. The tolerances override the tolerances
            of the cases.
        methods, cases: selection for :func:`hil.bundles.cases.select_methods`; empty selects all.
        key: see :func:`open_bundle`.
        run_id, isolated, choice: see :func:`hil.controller.workloads.run_job.run_job`.

    Returns:
        The run's record (the schema of docs/run.schema.json) with ``folder``, the run's directory.

    Raises:
        UsageError: the file is not a bundle or is damaged, or the request is invalid; nothing was run.
        KeyboardInterrupt: Ctrl-C; partial results are stored.
    """
    (path,) = job.models
    bundle = open_bundle(path, key)
    chosen = select_methods([bundle.method(name) for name in dict.fromkeys(methods)] or bundle.methods, cases)
    job = replace(job, runtime=bundle.program.runtime)
    choice = use_device(choice, job.runtime, job.device) if choice else choose_board(job)
    if missing := describe_untested(chosen):
        screen.note(missing)
    with lend_pool(isolated, 1) as workers, make_temporary_folder("hil-bundle-") as folder:
        place = Path(folder)
        (place / "program").mkdir()
        artifact = add_seal(bundle.extract(place / "program"), bundle.head, place)
        runs = [
            ProgramCase(
                path, bundle.digest, method, given, artifact, read_random_record(bundle.made, method.name)
            ).begin(job.make_options(), Path())
            for method in chosen
            for given in method.cases
        ]
        names = make_names_unique([make_safe_name(case.name) for case in runs], alike=str.casefold)
        runs = [replace(case, name=name) for case, name in zip(runs, names, strict=True)]
        # With multiple targets, this is the command for the whole matrix.
        run = RunStore(job.out).create(path.stem, convert_to_json(asdict(job)), run_id, command=get_typed_command())
        if not runs:
            run.record.exit_code, run.record.finished = EXIT_NOTHING_RAN, True
            run.save()
            return run.record.replace(folder=str(run.folder))
        return run_cases(
            run,
            job,
            choice,
            runs,
            RunContext(Cache(), workers),
            screen,
            runtimes=(job.runtime,),
            purpose=f"hil bundle run {run.id}",
            most_loaded=1,  # all cases of a method run in the worker that loaded the method
        )

"""Restore a case from a stored run, to run its program again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hil.compare.criteria import parse_accept
from hil.controller.devices.choosing.board_resolver import is_without_config
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.settings.model_settings import apply_model_settings
from hil.controller.pipeline.settings.options import Job
from hil.controller.records.measurements.bench import BenchProgram
from hil.controller.records.measurements.history import StoredProgram
from hil.controller.records.run import RunCase, StoredSpec
from hil.controller.storage.runs import Run
from hil.core.boards import is_file
from hil.core.results import Artifact, RunResult
from hil.core.tensors import TensorSpec
from hil.errors import UsageError

# Fields that select a job's board, except faults of a simulator.
_WHERE = ("board", "hw_type", "identity", "known_hosts", "accept_new_host_key")


def copy_board_options(job: Job, other: Job) -> Job:
    """Return a job with the board of another job, but without that job's simulator faults."""
    return replace(job, **{name: getattr(other, name) for name in _WHERE})


def restore_board(stored: Job, job: Job, *, own: bool) -> Job:
    """Return a stored job with a board that it may use. A record from another user must not select a board.

    Raises:
        UsageError: the record is not the user's, names an address or a file, and no board was given.
    """
    if own:
        return stored
    if job.board or job.hw_type:
        return copy_board_options(stored, job)
    if is_file(stored.board) or is_without_config(stored.board):
        raise UsageError(
            f"cannot use board {stored.board} from the stored bench: this user did not create its record at this path",
            hint="select the board with --board",
        )
    return replace(stored, identity=None, known_hosts=None, accept_new_host_key=False)


def restore_spec(spec: StoredSpec) -> TensorSpec:
    """Return a stored input or output specification."""
    return TensorSpec(spec.name, spec.dtype, tuple(spec.shape))


def restore_artifact(program: BenchProgram | StoredProgram, files: Mapping[str, Path]) -> Artifact:
    """Return a stored program, with its files by name."""
    outputs = program.outputs
    return Artifact(
        runtime=program.runtime,
        main=program.main,
        files=dict(files),
        digests=program.digests if isinstance(program, BenchProgram) else program.files,
        function=program.function,
        compiler=program.compiler,
        flags=tuple(program.flags),
        outputs=None if outputs is None else tuple(map(restore_spec, outputs)),
        cached=True,
    )


def restore_references(run: Run, case: RunCase) -> tuple[RunResult, ...]:
    """Return the stored references of a case."""
    return tuple(
        RunResult(one.source, run.load_tensors(one.outputs), provenance=one.provenance, relation=one.relation)
        for one in case.references
    )


def restore_case(run: Run, case: RunCase, job: Job, artifact: Artifact) -> Case:
    """Return a stored case for a new run: same inputs, references and options, with the given program."""
    path = next((path for path in job.models if str(path) == case.path), Path(case.path))
    options = apply_model_settings(job.make_options(), path)
    if (judging := case.judging) is not None:
        if set(judging.accept) - set(options.accept):
            # The record is not protected like the job, so it must not name a Python function.
            parse_accept(judging.accept)
        options = replace(
            options,
            rtol=judging.rtol,
            atol=judging.atol,
            replace_blind_tolerance=judging.replace_blind_tolerance,
            accept=tuple(judging.accept),
        )
    return Case(
        case.name,
        path,
        options,
        Path(),
        artifact=artifact,
        inputs=run.load_tensors(case.inputs),
        references=restore_references(run, case),
    )

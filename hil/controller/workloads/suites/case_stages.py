"""A suite's case on its way through the pipeline: what the engine and the pytest plugin share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hil.controller.devices.board_factory import AnyBoard
from hil.controller.models.flows import Flow, quantum_atol
from hil.controller.pipeline.case import DEFAULT_TIMEOUT_S, Case, Options, Workshop, end_case
from hil.controller.pipeline.case_runner import refer_and_conclude, refer_early
from hil.controller.pipeline.stages import begin, execute, prepare
from hil.controller.storage.runs import storing
from hil.controller.workloads.suites.spec import CaseData, CaseSpec
from hil.core.boards import BoardConfig
from hil.core.results import Stage
from hil.errors import (
    CompileFailed,
    HilError,
    ImportFailed,
    ReferenceFailed,
    RunFailed,
    StorageError,
    UsageError,
    VacuousTolerance,
)


@dataclass(frozen=True)
class Settings:
    """How a suite's cases are to be run, whatever the flow.

    Attributes:
        seed: of random inputs.
        rtol, atol: in place of the cases' and the flow's own tolerances; None keeps those.
        allow_blind: patterns of names of outputs that may pass though nobody can judge them.
        iterations, warmup: timed and untimed runs.
        timeout: seconds for loading, for the runs together, and for each reference.
        recompute: do not take programs or reference results from the cache.
        debug_ir: folder for the compiler's IR, one below it for each case.
        profile: run a second time under the runtime's profiler.
        no_fallback: a node that runs on another device than it was told to is an error.
    """

    seed: int = 0
    rtol: float | None = None
    atol: float | None = None
    allow_blind: tuple[str, ...] = ()
    iterations: int = 1
    warmup: int = 0
    timeout: float = DEFAULT_TIMEOUT_S
    recompute: bool = False
    debug_ir: Path | None = None
    profile: bool = False
    no_fallback: bool = False


def begin_case(spec: CaseSpec, flow: Flow, shop: Workshop, folder: Path, settings: Settings) -> Case:
    """Make a case's data and import its model. Whatever fails is the outcome of the case.

    Args:
        spec: the case.
        flow: how it is compiled and judged.
        shop: what cases share.
        folder: the case's own; it is made anew, with ``logs`` in it: a run that was killed may have left something.
        settings: how it is run.
    """
    with storing(folder):
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    try:
        data = spec.make(shop, folder)
        if data.program is not None:
            return replace(data.program.begin(options_for(data, flow, settings, spec.id), folder), name=spec.id)
        quantum = quantum_atol(flow, data.path, shop, folder / "logs" / "import.log")
        if quantum is not None:
            data = replace(data, atol=max(quantum, data.atol or 0.0))
        return replace(begin(data.path, options_for(data, flow, settings, spec.id), folder, shop), name=spec.id)
    except StorageError:
        raise
    except HilError as error:
        case = Case(spec.id, folder / "unread", Options(runtime=flow.runtime), folder)
        end_case(case, _outcome(error, ImportFailed), Stage.IMPORT)
        return case


def prepare_case(case: Case, config: BoardConfig, shop: Workshop) -> Case:
    """Compile a case for a board, on the host."""
    with _told(case, Stage.COMPILE, CompileFailed):
        prepare(case, config, shop)
    return case


def refer_ahead(case: Case, shop: Workshop) -> Case | None:
    """Ask the references while the case waits for its board.

    Returns:
        A copy of the case, for :func:`conclude_case`; None where it has its outcome, its inputs are not known yet, or
        it came with what is expected.
    """
    if case.outcome or case.inputs is None or case.references:
        return None
    copy = replace(case)
    with _told(copy, Stage.REFER, ReferenceFailed):
        copy = refer_early(case, shop)
    return copy


def execute_case(case: Case, board: AnyBoard, shop: Workshop) -> Case:
    """Push, load and run on the board."""
    with _told(case, Stage.RUN, RunFailed):
        execute(case, board, shop)
    return case


def conclude_case(case: Case, early: Case | None, shop: Workshop, settings: Settings) -> Case:
    """Compare what the board gave with the references: those the case has, those asked early, or asked now.

    A flow, or a case itself, has one tolerance for many outputs. Where that cannot judge them, hil's default does, and
    the reason says so. A tolerance that the user typed is never replaced: there the case is BLIND.
    """
    with _told(case, Stage.COMPARE, ReferenceFailed):
        try:
            refer_and_conclude(case, early, shop)
        except VacuousTolerance as error:
            if settings.rtol is not None or settings.atol is not None:
                raise
            case.options = replace(case.options, rtol=None, atol=None)
            refer_and_conclude(case, early, shop)
            note = f"judged within hil's default tolerances: {error.message}"
            case.reason = "; ".join(filter(None, (case.reason, note)))
    return case


@contextmanager
def _told(case: Case, stage: Stage, kind: type[HilError]) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except UsageError as error:
        end_case(case, _outcome(error, kind), stage)


def _outcome(error: HilError, kind: type[HilError]) -> HilError:
    """What a user of `hil run` typed wrongly, a suite found in a model or a flow: an outcome of its case.

    A tolerance that cannot judge one case may suit all the others: that is an outcome as well.
    """
    if not isinstance(error, UsageError) or isinstance(error, VacuousTolerance):
        return error
    return kind(error.message, hint=error.hint, detail=error.detail)


def options_for(data: CaseData, flow: Flow, settings: Settings, case_id: str) -> Options:
    """The pipeline's options for a case: its data, its flow, and how it is to be run."""
    # A tolerance that the user typed goes before the flow's, and that before the case's own.
    chosen: Mapping[str, Any] = {
        name: next(
            (one for one in (getattr(settings, name), getattr(flow, name)) if one is not None), getattr(data, name)
        )
        for name in ("rtol", "atol")
    }
    return Options(
        runtime=flow.runtime,
        compiler=flow.compiler,
        compile_flags=flow.compile_flags,
        dims=data.dims,
        inputs=data.inputs,
        expected=data.expected,
        plain_model=data.plain_path,
        plain_expected=data.plain_expected,
        min_sqnr_db=flow.min_sqnr_db,
        allow_blind=settings.allow_blind,
        seed=settings.seed,
        iterations=settings.iterations,
        warmup=settings.warmup,
        timeout=settings.timeout,
        recompute=settings.recompute,
        debug_ir=settings.debug_ir / case_id if settings.debug_ir else None,
        profile=settings.profile,
        no_fallback=settings.no_fallback,
        **chosen,
    )

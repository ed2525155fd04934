"""The host's half of a suite: each case's data, its program and its references, made in parallel."""

from __future__ import annotations

import concurrent.futures
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hil.compare.criteria import with_outputs
from hil.controller.backends.compilers.iree_group import compile_together, has_compiled
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.models.flows import Flow, quantum_atol
from hil.controller.pipeline.accepting import check_accepted_outputs
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.model_settings import accept_of_file, for_model
from hil.controller.pipeline.options import COMPILE_TIMEOUT_S, Options, RunSettings
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.stages import check_options
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.runs import storing
from hil.controller.workloads.suites.request import Settings
from hil.controller.workloads.suites.spec import CaseData, CaseSpec
from hil.controller.workloads.suites.store import SuiteRun
from hil.controller.workloads.suites.tasks import Task, unread
from hil.core.board_config import BoardConfig
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

# So many cases are read before the first is compiled: small programs are compiled many at a time. And so many cases'
# tensors are in memory at once.
_BATCH = 96


# What bad usage that a stage finds is in a suite.
_KINDS: Mapping[Stage, type[HilError]] = {
    Stage.IMPORT: ImportFailed,
    Stage.COMPILE: CompileFailed,
    Stage.REFER: ReferenceFailed,
    Stage.COMPARE: ReferenceFailed,
}


def suite_runner(context: RunContext) -> Runner:
    """The runner of a suite's cases: what a user of `hil run` typed wrongly, a suite found in a model or a flow."""
    return Runner(context, of_usage=_outcome, logs=False)


def begin_case(spec: CaseSpec, flow: Flow, runner: Runner, folder: Path, settings: Settings, name: str = "") -> Case:
    """Make a case's data and import its model. Whatever fails is the outcome of the case.

    Args:
        folder: the case's own; it is made anew, with ``logs`` in it: a run that was killed may have left something.
        name: the case's; "" is its id.
    """
    with storing(folder):
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    name = name or spec.id
    try:
        data = spec.make(folder)
        if data.program is not None:
            return data.program.begin(options_for(data, flow, settings, spec), folder, name)
        quantum = quantum_atol(flow, data.path, runner.context, folder / "logs" / "import.log")
        if quantum is not None:
            data = replace(data, atol=max(quantum, data.atol or 0.0))
        case = runner.begin(data.path, options_for(data, flow, settings, spec), folder, name=name)
        if not spec.layer:
            check_accepted_outputs([(accept_of_file(settings, _model_path(data, spec)), case.model)])
        return case
    except StorageError:
        raise
    except HilError as error:
        case = unread(name, flow.runtime, folder)
        failure = _outcome(error, Stage.IMPORT) if isinstance(error, UsageError) else error
        return case.ended(failure, Stage.IMPORT)


def _outcome(error: UsageError, stage: Stage) -> HilError:
    """The error that ends a case in place of bad usage.

    A tolerance that cannot judge one case may suit all the others: that is an outcome as well.
    """
    if isinstance(error, VacuousTolerance):
        return error
    return _KINDS.get(stage, RunFailed)(error.message, hint=error.hint, detail=error.detail)


def check_settings(settings: Settings, flow: Flow, choices: Iterable[BoardChoice]) -> None:
    """Refuse settings that cannot be meant on one of the boards; errors as for :func:`check_options`."""
    chosen = {**vars(settings), "references": references_of(settings, flow)}
    for choice in choices:
        check_options(Options(**chosen, runtime=flow.runtime), choice)


def references_of(settings: Settings, flow: Flow) -> tuple[str, ...]:
    """The references that are named: those that the user typed, else the flow's."""
    return settings.references or flow.references


def _model_path(data: CaseData, spec: CaseSpec) -> Path:
    return Path(spec.file.path) if spec.file is not None else data.path


def options_for(data: CaseData, flow: Flow, settings: Settings, spec: CaseSpec) -> Options:
    """The pipeline's options for a case: its data, its flow, and how it is to be run.

    What the project file has for a model is for the whole model. So are criteria that name no output: what a layer
    returns is judged within the tolerance.
    """
    input_range = None
    if spec.layer:
        settings = replace(settings, per_model={})
    else:
        path = _model_path(data, spec)
        input_range = for_model(RunSettings(per_model=settings.per_model), path).input_range
        settings = for_model(settings, path)
    accept = settings.accept or flow.accept
    chosen: dict[str, Any] = {
        "debug_ir": settings.debug_ir / spec.id if settings.debug_ir else None,
        "references": references_of(settings, flow),
        "accept": with_outputs(accept) if spec.layer else accept,
        "arithmetic": settings.arithmetic or flow.arithmetic,
    }
    for name in ("rtol", "atol"):
        # A tolerance that the user typed goes before the flow's, and that before the case's own.
        given = [getattr(one, name) for one in (settings, flow, data)]
        chosen[name] = next((one for one in given if one is not None), None)
    return Options(
        **{**vars(settings), **chosen},
        runtime=flow.runtime,
        compiler=flow.compiler,
        compile_flags=flow.compile_flags,
        dims=data.dims,
        inputs=data.inputs,
        input_range=input_range,
        expected=data.expected,
        plain_model=data.plain_path,
        plain_expected=data.plain_expected,
        min_sqnr_db=flow.min_sqnr_db,
        # A flow, or a case, has one tolerance for many outputs; what the user typed is never replaced.
        replace_blind_tolerance=settings.rtol is None and settings.atol is None,
    )


def prepared(
    specs: Sequence[CaseSpec],
    flow: Flow,
    settings: Settings,
    runner: Runner,
    config: BoardConfig,
    run: SuiteRun,
    over: threading.Event,
) -> Iterator[Task]:
    """Cases that are ready to run, or that ended before, as they come; until ``over`` is set."""
    context = runner.context
    batches = [specs[start : start + _BATCH] for start in range(0, len(specs), _BATCH)]
    with concurrent.futures.ThreadPoolExecutor(context.isolated.workers, thread_name_prefix="prepare") as pool:

        def begin_one(spec: CaseSpec) -> Case | Task:
            case = begin_case(spec, flow, runner, run.case_folder(spec.id), settings)
            # A board need not wait for those that are still to be compiled.
            return case if _needs_compiler(case, flow, settings, config, context) else finish(case, None)

        def begin(batch: Sequence[CaseSpec]) -> list[concurrent.futures.Future[Case | Task]]:
            return [pool.submit(begin_one, spec) for spec in batch]

        def finish(case: Case, seconds: float | None) -> Task:
            if over.is_set():
                return Task(case)
            case = _compile(case, config, runner, seconds)
            # A reference depends on model and inputs alone, so it is computed while boards run.
            return Task(case, runner.refer_early(case))

        begun = begin(batches[0]) if batches else []
        try:
            for number in range(len(batches)):
                if over.is_set():
                    return
                for future in concurrent.futures.as_completed(begun):
                    if isinstance(found := future.result(), Task):
                        yield found
                # In the suite's order, so that the same ones are compiled together each time.
                cases = [found for future in begun if isinstance(found := future.result(), Case)]
                begun = begin(batches[number + 1]) if number + 1 < len(batches) else []
                logs = run.folder / "logs" / f"{number:03}"
                compiled = _compiled_together(cases, flow, settings, config, context, logs)
                finishing = [
                    pool.submit(finish, case, compiled.get(case.model.digest if case.model else "")) for case in cases
                ]
                for ready in concurrent.futures.as_completed(finishing):
                    yield ready.result()
        finally:
            for future in begun:
                future.cancel()


def _needs_compiler(case: Case, flow: Flow, settings: Settings, config: BoardConfig, context: RunContext) -> bool:
    """Whether a case's program is still to be made by a compiler that makes several at once."""
    if case.outcome or case.model is None or case.artifact is not None or (flow.compiler or flow.runtime) != "iree":
        return False
    try:
        return settings.recompute or not has_compiled(case.model, flags=_flags(flow, config), cache=context.cache)
    except HilError:
        # Compiling it will say what is wrong.
        return True


def _flags(flow: Flow, config: BoardConfig) -> tuple[str, ...]:
    return (*config.compile_flags.get("iree", ()), *flow.compile_flags)


def _compiled_together(
    cases: Sequence[Case], flow: Flow, settings: Settings, config: BoardConfig, context: RunContext, logs: Path
) -> dict[str, float]:
    """Compile small models many at a time; digest -> each one's share of the seconds, of those compiled now."""
    models = [case.model for case in cases if case.model is not None and not case.outcome]
    if (flow.compiler or flow.runtime) != "iree" or settings.debug_ir is not None:
        return {}
    start = time.monotonic()
    try:
        done = compile_together(
            models,
            flags=_flags(flow, config),
            cache=context.cache,
            isolated=context.isolated,
            recompute=settings.recompute,
            timeout=COMPILE_TIMEOUT_S,
            log_folder=logs,
        )
    except HilError:
        # Each is compiled alone then, and says itself what is wrong.
        return {}
    share = (time.monotonic() - start) / max(len(done.compiled), 1)
    return {model.digest: share for model in done.compiled}


def _compile(case: Case, config: BoardConfig, runner: Runner, seconds: float | None) -> Case:
    """Compile a case; ``seconds`` is what it took where it was compiled together with others just now."""
    if seconds is None:
        return runner.compile(case, config)
    # It was made anew together with the others; once is enough.
    made = runner.compile(replace(case, options=replace(case.options, recompute=False)), config)
    made = replace(made, options=case.options)
    if made.artifact is None or not made.artifact.cached:
        return made
    return replace(made, artifact=replace(made.artifact, cached=False, seconds=seconds)).timed(compile_s=seconds)

"""Prepare the cases of a suite on the host in parallel: data, programs and references."""

from __future__ import annotations

import concurrent.futures
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hil.compare.criteria import select_output_texts
from hil.controller.backends.compilers.iree_group import compile_together, has_compiled
from hil.controller.backends.gpu_targets import combine_flags
from hil.controller.devices.board_choice import BoardChoice, use_device
from hil.controller.devices.choosing.board_resolver import choose
from hil.controller.models.flows.flow import Flow
from hil.controller.models.flows.quanta import compute_quantum_atol
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.model_settings import accept_of_file, apply_model_settings
from hil.controller.pipeline.settings.options import COMPILE_TIMEOUT_SECONDS, Options
from hil.controller.pipeline.stages import check_options
from hil.controller.pipeline.verdicts.accepting import check_accepted_outputs
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.runs import convert_write_errors
from hil.controller.workloads.suites.cases.spec import CaseData, CaseSpec
from hil.controller.workloads.suites.request import Settings, SuiteRequest
from hil.controller.workloads.suites.store import SuiteDirectory
from hil.controller.workloads.suites.tasks import Task, make_unread_case
from hil.core.board_config import BoardConfig
from hil.core.futures import iterate_completed
from hil.core.mcu_config import MCU_RUNTIME
from hil.core.results import Model, Stage
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

# Cases to read before the first is compiled, so that small programs are compiled in groups. This also limits the cases
# with tensors in memory.
_BATCH = 96


# Stage -> error class that replaces UsageError in this stage of a suite.
_KINDS: Mapping[Stage, type[HilError]] = {
    Stage.IMPORT: ImportFailed,
    Stage.COMPILE: CompileFailed,
    Stage.REFER: ReferenceFailed,
    Stage.COMPARE: ReferenceFailed,
}


def make_suite_runner(context: RunContext) -> Runner:
    """Return the runner of a suite's cases.

    The runner converts usage errors to outcomes, because a model or flow caused them.
    """
    return Runner(context, of_usage=_convert_usage_error, logs=False)


def begin_case(spec: CaseSpec, flow: Flow, runner: Runner, folder: Path, settings: Settings, name: str = "") -> Case:
    """Create a case's data and import the model. Any failure becomes the outcome of the case.

    Args:
        folder: the case's directory. It is recreated with ``logs``, because a killed run may have left files.
        name: the case's name; "" is the ID.
    """
    with convert_write_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    name, flow = name or spec.id, spec.flow or flow
    try:
        data = spec.make(folder)
        if data.program is not None:
            return data.program.begin(make_options(data, flow, settings, spec), folder, name)
        quantum = compute_quantum_atol(flow, data.path, runner.context, folder / "logs" / "import.log")
        if quantum is not None:
            data = replace(data, atol=max(quantum, data.atol or 0.0))
        case = runner.begin(data.path, make_options(data, flow, settings, spec), folder, name=name)
        if not spec.layer:
            check_accepted_outputs([(accept_of_file(settings, _choose_model_path(data, spec)), case.model)])
        return case
    except StorageError:
        raise
    except HilError as error:
        case = make_unread_case(name, flow.runtime, folder)
        failure = _convert_usage_error(error, Stage.IMPORT) if isinstance(error, UsageError) else error
        return case.with_error(failure, Stage.IMPORT)


def _convert_usage_error(error: UsageError, stage: Stage) -> HilError:
    """Return the error that ends a case instead of a usage error.

    A tolerance that cannot judge this case may be suitable for all other cases, so this error also becomes an outcome.
    """
    if isinstance(error, VacuousTolerance):
        return error
    return error.as_kind(_KINDS.get(stage, RunFailed))


def check_settings(settings: Settings, flow: Flow, choices: Iterable[BoardChoice]) -> None:
    """Check that the settings are valid on all boards. Raises the errors of :func:`check_options`."""
    chosen = {**vars(settings), "references": choose_references(settings, flow)}
    for choice in choices:
        check_options(Options(**chosen, runtime=flow.runtime), choice)


def resolve_boards(request: SuiteRequest, flow: Flow) -> list[BoardChoice]:
    """Return the boards of a request, with the flow's device.

    Raises UsageError for duplicates, and the errors of :func:`choose`.
    """
    ssh: dict[str, Any] = {name: Path(path) for name in ("identity", "known_hosts") if (path := request.ssh.get(name))}
    ssh["accept_new_host_key"] = bool(request.ssh.get("accept_new_host_key"))
    choices = [choose(board, request.hw_type, **ssh) for board in request.boards or ("",)]
    names = [choice.name for choice in choices]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(
            f"duplicate --board {twice}", hint="specify each board once: a board runs one program at a time"
        )
    return use_flow_device(choices, flow)


def use_flow_device(choices: Iterable[BoardChoice], flow: Flow) -> list[BoardChoice]:
    """Return the boards with the flow's device."""
    return [use_device(choice, flow.runtime, flow.device) for choice in choices]


def choose_board_runtime(request: SuiteRequest, choices: Sequence[BoardChoice]) -> SuiteRequest:
    """Return the request with the runtime of microcontrollers, if the user selected neither flow nor runtime."""
    if request.yields_flow and all(choice.config.mcu is not None for choice in choices):
        return replace(request, runtime=MCU_RUNTIME)
    return request


def choose_references(settings: Settings, flow: Flow) -> tuple[str, ...]:
    """Return the user's references, or the flow's references."""
    return settings.references or flow.references


def _choose_model_path(data: CaseData, spec: CaseSpec) -> Path:
    return Path(spec.file.path) if spec.file is not None else data.path


def make_options(data: CaseData, flow: Flow, settings: Settings, spec: CaseSpec) -> Options:
    """Return the pipeline options for a case, from its data, flow and settings.

    Three settings apply to a whole model, but not to its layers: the project file's settings for the model, the input
    range, and criteria without an output name. The tolerance judges layers.
    """
    if spec.layer:
        settings = replace(settings, per_model={}, input_range=None)
    else:
        settings = apply_model_settings(settings, _choose_model_path(data, spec))
    accept = settings.accept or flow.accept
    chosen: dict[str, Any] = {
        "debug_ir": settings.debug_ir / spec.id if settings.debug_ir else None,
        "references": choose_references(settings, flow),
        "accept": select_output_texts(accept) if spec.layer else accept,
        "arithmetic": settings.arithmetic or flow.arithmetic,
        "compile_flags": (*flow.compile_flags, *settings.compile_flags),
    }
    for name in ("rtol", "atol"):
        # The user's tolerance overrides the flow's tolerance, which overrides the case's tolerance.
        given = [getattr(one, name) for one in (settings, flow, data)]
        chosen[name] = next((one for one in given if one is not None), None)
    if data.generate is not None:  # judged by a reference in the board's arithmetic
        chosen |= {"references": (), "rtol": None, "atol": None}
    return Options(
        **{**vars(settings), **chosen},
        runtime=flow.runtime,
        compiler=flow.compiler,
        dims=data.dims,
        inputs=data.inputs,
        expected=data.expected,
        generate=data.generate,
        prompt=data.prompt,
        plain_model=data.plain_path,
        plain_expected=data.plain_expected,
        min_sqnr_db=flow.min_sqnr_db,
        # A flow or case has a single tolerance for many outputs, so replace it for outputs that it cannot judge. The
        # user's tolerance is never replaced.
        replace_blind_tolerance=settings.rtol is None and settings.atol is None,
    )


def iter_prepared(
    specs: Sequence[CaseSpec],
    flow: Flow,
    settings: Settings,
    runner: Runner,
    config: BoardConfig,
    run: SuiteDirectory,
    over: threading.Event,
) -> Iterator[Task]:
    """Yield tasks with cases that are ready to run or have ended, until ``over`` is set."""
    context = runner.context
    batches = [specs[start : start + _BATCH] for start in range(0, len(specs), _BATCH)]
    with concurrent.futures.ThreadPoolExecutor(context.isolated.workers, thread_name_prefix="prepare") as pool:

        def begin_one(spec: CaseSpec) -> Case | Task:
            case = begin_case(spec, flow, runner, run.get_case_folder(spec.id), settings)
            # Immediately finish cases that need no compiler, so that boards need not wait.
            return case if _needs_compiler(case, settings, config, context) else finish(case, None)

        def begin(batch: Sequence[CaseSpec]) -> list[concurrent.futures.Future[Case | Task]]:
            return [pool.submit(begin_one, spec) for spec in batch]

        def finish(case: Case, seconds: float | None) -> Task:
            if over.is_set():
                return Task(case)
            case = _compile_case(case, config, runner, seconds)
            # Compute the reference while boards run, because it needs only the model and the inputs.
            return Task(case, runner.refer_early(case))

        begun = begin(batches[0]) if batches else []
        try:
            for number in range(len(batches)):
                if over.is_set():
                    return
                for future in iterate_completed(begun):
                    if isinstance(found := future.result(), Task):
                        yield found
                # Keep the suite's order, so that every run compiles the same groups.
                cases = [found for future in begun if isinstance(found := future.result(), Case)]
                begun = begin(batches[number + 1]) if number + 1 < len(batches) else []
                logs = run.folder / "logs" / f"{number:03}"
                compiled = _compile_groups(cases, settings, config, context, logs)
                finishing = [pool.submit(finish, case, compiled.get(_group_key(case, config))) for case in cases]
                for ready in iterate_completed(finishing):
                    yield ready.result()
        finally:
            for future in begun:
                future.cancel()


def _needs_compiler(case: Case, settings: Settings, config: BoardConfig, context: RunContext) -> bool:
    """Return whether a case's program is missing and the compiler can compile groups."""
    if case.outcome or case.model is None or case.artifact is not None or not _uses_iree(case):
        return False
    try:
        return settings.recompute or not has_compiled(
            case.model, flags=_collect_flags(case, config), cache=context.cache
        )
    except HilError:
        # Return True, so that the compile stage reports the error.
        return True


def _uses_iree(case: Case) -> bool:
    """Return whether IREE compiles the case. Only IREE compiles groups."""
    return (case.options.compiler or case.options.runtime) == "iree"


def _collect_flags(case: Case, config: BoardConfig) -> tuple[str, ...]:
    return combine_flags(config.compile_flags.get("iree", ()), case.options.compile_flags)


def _group_key(case: Case, config: BoardConfig) -> tuple[str, tuple[str, ...]]:
    """Return the model's digest and the compiler flags."""
    return case.model.digest if case.model else "", _collect_flags(case, config)


def _compile_groups(
    cases: Sequence[Case], settings: Settings, config: BoardConfig, context: RunContext, logs: Path
) -> dict[tuple[str, tuple[str, ...]], float]:
    """Compile small models in groups.

    Returns the share of the compile time in seconds for every newly compiled model, by group key.
    """
    if settings.debug_ir is not None:
        return {}
    # The project file may set different flags for some models.
    by_flags: dict[tuple[str, ...], list[Model]] = {}
    for case in cases:
        if case.model is not None and not case.outcome and _uses_iree(case):
            by_flags.setdefault(_collect_flags(case, config), []).append(case.model)
    shares: dict[tuple[str, tuple[str, ...]], float] = {}
    for number, (flags, models) in enumerate(by_flags.items()):
        start = time.monotonic()
        try:
            done = compile_together(
                models,
                flags=flags,
                cache=context.cache,
                isolated=context.isolated,
                recompute=settings.recompute,
                timeout=COMPILE_TIMEOUT_SECONDS,
                log_folder=logs / str(number) if number else logs,
            )
        except HilError:
            # Compile these models separately, so that each case reports its error.
            continue
        share = (time.monotonic() - start) / max(len(done.compiled), 1)
        shares |= {(model.digest, flags): share for model in done.compiled}
    return shares


def _compile_case(case: Case, config: BoardConfig, runner: Runner, seconds: float | None) -> Case:
    """Compile a case. ``seconds`` is the case's share of the compile time if the case was just compiled in a group."""
    if seconds is None:
        return runner.compile(case, config)
    # Use the cache, because the group has just been compiled again.
    made = runner.compile(replace(case, options=replace(case.options, recompute=False)), config)
    made = replace(made, options=case.options)
    if made.artifact is None or not made.artifact.cached:
        return made
    return replace(made, artifact=replace(made.artifact, cached=False, seconds=seconds)).with_timings(compile_s=seconds)

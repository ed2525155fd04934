"""The host's half of a suite: each case's data, its program and its references, made in parallel."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hil.controller.backends.compilers.iree_group import compile_together, has_compiled
from hil.controller.models.flows import Flow
from hil.controller.pipeline.case import Case, Workshop
from hil.controller.pipeline.options import COMPILE_TIMEOUT_S, Options
from hil.controller.pipeline.runner import Runner
from hil.controller.workloads.suites.request import Settings, begin_case
from hil.controller.workloads.suites.spec import CaseSpec
from hil.controller.workloads.suites.store import SuiteRun
from hil.controller.workloads.suites.tasks import Task
from hil.core.board_config import BoardConfig
from hil.errors import HilError

# So many cases are read before the first is compiled: small programs are compiled many at a time. And so many cases'
# tensors are in memory at once.
_BATCH = 96


def prepared(
    specs: Sequence[CaseSpec],
    flow: Flow,
    settings: Settings,
    runner: Runner,
    config: BoardConfig,
    run: SuiteRun,
    over: threading.Event,
) -> Iterator[Task]:
    """Cases that are ready to run, or that ended before, as they come.

    Args:
        specs: the cases.
        flow, settings: how they are made.
        runner: takes them through the host's stages.
        config: of the board that they are compiled for.
        run: whose folder takes the cases' files.
        over: set when nobody wants more.
    """
    shop = runner.shop
    batches = [specs[start : start + _BATCH] for start in range(0, len(specs), _BATCH)]
    with concurrent.futures.ThreadPoolExecutor(shop.isolated.workers, thread_name_prefix="prepare") as pool:

        def begin_one(spec: CaseSpec) -> Case | Task:
            case = begin_case(spec, flow, runner, run.case_folder(spec.id), settings)
            # A board need not wait for those that are still to be compiled.
            return case if _needs_compiler(case, flow, settings, config, shop) else finish(case, None)

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
                compiled = _compiled_together(cases, flow, settings, config, shop, run.folder / "logs" / f"{number:03}")
                for ready in concurrent.futures.as_completed(
                    [pool.submit(finish, case, compiled.get(case.model.digest if case.model else "")) for case in cases]
                ):
                    yield ready.result()
        finally:
            for future in begun:
                future.cancel()


def _needs_compiler(case: Case, flow: Flow, settings: Settings, config: BoardConfig, shop: Workshop) -> bool:
    """Whether a case's program is still to be made by a compiler that makes several at once."""
    if case.outcome or case.model is None or case.artifact is not None or (flow.compiler or flow.runtime) != "iree":
        return False
    try:
        return settings.recompute or not has_compiled(case.model, flags=_flags(flow, config), cache=shop.cache)
    except HilError:
        # Compiling it will say what is wrong.
        return True


def _flags(flow: Flow, config: BoardConfig) -> tuple[str, ...]:
    return (*config.compile_flags.get("iree", ()), *flow.compile_flags)


def _compiled_together(
    cases: Sequence[Case], flow: Flow, settings: Settings, config: BoardConfig, shop: Workshop, logs: Path
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
            cache=shop.cache,
            isolated=shop.isolated,
            recompute=settings.recompute,
            timeout=COMPILE_TIMEOUT_S,
            log_folder=logs,
        )
    except HilError:
        # Each is compiled alone then, and says itself what is wrong.
        return {}
    share = (time.monotonic() - start) / max(len(done.compiled), 1)
    return {model.digest: share for model in done.compiled}


def unread(spec: CaseSpec, flow: Flow, folder: Path) -> Case:
    """A case that nothing was done for: nobody knows what to compile it for."""
    return Case(spec.id, folder / "unread", Options(runtime=flow.runtime), folder)


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

"""Run each dispatch of an IREE program separately on a board, and compare with numpy or the CPU backend."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hil.controller.analysis.bisect.find import judge_case, keep_case, repeat_command
from hil.controller.analysis.bisect.result import make_finding
from hil.controller.analysis.dispatches.extract import FUNCTION, Dispatch, extract_dispatches
from hil.controller.backends.gpu_targets import combine_flags
from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice, knows_target
from hil.controller.models.importers import import_model
from hil.controller.pipeline.boards.board_pool import BoardPool
from hil.controller.pipeline.case import Case, ProgressSink
from hil.controller.pipeline.instructions import summarise_counts
from hil.controller.pipeline.records.record import record_specs
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.given_inputs import add_inputs_file
from hil.controller.pipeline.settings.model_settings import apply_model_settings
from hil.controller.pipeline.settings.options import COMPILE_TIMEOUT_SECONDS, Options
from hil.controller.pipeline.stages import check_options
from hil.controller.records.measurements.dispatches import DispatchList, DispatchResult
from hil.controller.storage.run_context import Progress, RunContext
from hil.controller.storage.runs import convert_write_errors, write_json
from hil.core.board_config import BoardConfig
from hil.core.results import Outcome, Relation, Stage, exit_code_of
from hil.core.runtimes import DEFAULT_RUNTIME
from hil.core.scratch import make_temporary_folder
from hil.errors import BoardRefused, BoardUnreachable, UsageError, did_you_mean

NUMPY = "numpy"
CPU_BACKEND = "iree-llvm-cpu"
_FILE = "dispatches.json"


def check_dispatches(
    model: Path,
    choice: BoardChoice,
    *,
    context: RunContext,
    screen: Progress,
    options: Options,
    keys: Collection[str] = (),
    faults: tuple[str, ...] = (),
    wait_s: float = 60.0,
    out: Path | None = None,
    board_options: Sequence[str] = (),
) -> DispatchList:
    """Run the dispatches of a model's program on a board, each as a separate program with random inputs.

    Numpy computes the expected outputs from the dispatch's IR. If numpy cannot, the host's CPU backend computes them.
    This backend shares the compiler, so agreement with it does not count as a pass.

    Args:
        options: compile flags, seed, tolerance, iterations and so on, as for a run. The runtime is IREE.
        keys: the dispatches to run; empty means all.
        out: directory for ``dispatches.json``, and for the files of dispatches that did not pass; None stores nothing.
        board_options: options of ``hil run`` for the same board and tolerance, for the commands that repeat a dispatch.

    Raises:
        UsageError: an option is invalid, or a dispatch does not exist.
        ImportFailed, CompileFailed, CompileCrashed, StageTimeout: the model's dispatches cannot be extracted.
        BoardRefused, BoardUnreachable: the board was never reached.
        StorageError: the directory cannot be written.
    """
    options = replace(add_inputs_file(apply_model_settings(options, model), model), runtime=DEFAULT_RUNTIME)
    check_options(options, choice)
    used = choice.name

    def note_board(board: Board) -> None:
        nonlocal used
        used = board.name

    with (
        make_temporary_folder("hil-dispatches-") as scratch,
        BoardPool(f"hil layers {model.name}", wait_s=wait_s, say=screen.note, opened=note_board) as pool,
    ):
        config = choice.config
        if not knows_target(config, options.runtime):
            config = pool.session(choice, runtimes=(options.runtime,), faults=faults).board.config
        flags = combine_flags(config.compile_flags.get(options.runtime, ()), options.compile_flags)
        screen.begin(model.stem, 1)
        screen.stage(model.stem, 0, "extracting dispatches")
        folder = out or Path(scratch)
        try:
            dispatches = _extract(model, flags, options, context, folder)
        finally:
            screen.end(model.stem)
        listed = _select(dispatches, keys)
        can_run = [dispatch for dispatch in listed if not dispatch.reason]
        found: dict[str, DispatchResult] = {}
        screen.begin(model.stem, len(can_run))

        def watch(case: Case, stage: Stage, note: str) -> None:
            screen.stage(model.stem, len(found), f"{case.name}: {stage.value} {note}".strip())

        runner = Runner(context, sink=ProgressSink(watch))
        accepts_model = functools.cache(lambda: _compiles(runner, model, options, config, folder / "model"))
        try:
            cases = [_begin(dispatch, options, folder, runner) for dispatch in can_run]
            ended = runner.run(cases, pool, choice, runtimes=(options.runtime,), faults=faults)
            for dispatch, case in zip(can_run, ended, strict=True):
                if not found and isinstance(case.error, (BoardRefused, BoardUnreachable)):
                    raise case.error
                case = skip_if_rejected_alone(case, accepts_model)
                found[dispatch.key] = _describe(dispatch, case, options, out, board_options)
        finally:
            screen.end(model.stem)
    results = [found.get(dispatch.key) or _describe_unsupported(dispatch) for dispatch in listed]
    record = DispatchList(
        schema=1,
        model=str(model),
        board=used,
        flags=list(flags),
        dispatches=results,
        folder=str(out or ""),
        exit_code=exit_code_of(one.finding.outcome for one in results),
    )
    if out is not None:
        write_json(out / _FILE, record.to_json())
    return record


def _extract(
    path: Path, flags: Sequence[str], options: Options, context: RunContext, folder: Path
) -> tuple[Dispatch, ...]:
    """Import the model and extract the dispatches."""
    how: dict[str, Any] = {"cache": context.cache, "isolated": context.isolated}
    log = folder / "logs" / "dispatches.log"
    with convert_write_errors(log.parent):
        log.parent.mkdir(parents=True, exist_ok=True)
    model = import_model(path, function=options.function, dims=options.dims, **how)
    limits: dict[str, Any] = {"recompute": options.recompute, "timeout": COMPILE_TIMEOUT_SECONDS}
    return extract_dispatches(model, flags, seed=options.seed, log=log, **limits, **how)


def _select(dispatches: Sequence[Dispatch], keys: Collection[str]) -> list[Dispatch]:
    """Return the dispatches with these keys, or all. Raises UsageError for an unknown key."""
    known = [dispatch.key for dispatch in dispatches]
    for key in keys:
        if key not in known:
            hint = f"{did_you_mean(key, known)}list them with --dispatches"
            raise UsageError(f"the program has no dispatch {key!r}", hint=hint, option="--dispatch")
    return [dispatch for dispatch in dispatches if not keys or dispatch.key in keys]


def _begin(dispatch: Dispatch, options: Options, folder: Path, runner: Runner) -> Case:
    assert dispatch.path is not None
    place = folder / dispatch.name
    with convert_write_errors(place):
        (place / "logs").mkdir(parents=True, exist_ok=True)
    expected = dispatch.load_expected()
    own = replace(
        options,
        function=FUNCTION,
        dims={},
        inputs=dispatch.load_inputs(),
        expected=expected,
        references=() if expected else (CPU_BACKEND,),
        # The pipeline compares with default tolerances. judge_case applies the user's tolerances.
        rtol=None,
        atol=None,
    )
    return runner.begin(dispatch.path, own, place, name=dispatch.name)


def skip_if_rejected_alone(case: Case, accepts_model: Callable[[], bool]) -> Case:
    """Return the case of a dispatch as skipped if the compiler rejects the dispatch, but accepts the model.

    The compiler's first phases transform an extracted dispatch again, for example its dimensions of size 1. The result
    can differ from the code of the dispatch in the model.
    """
    if case.outcome is not Outcome.COMPILE_ERROR or not accepts_model():
        return case
    return replace(
        case,
        outcome=Outcome.SKIP,
        reason=f"the compiler accepts the dispatch in the model, but not alone: {case.reason}",
    )


def _compiles(runner: Runner, model: Path, options: Options, config: BoardConfig, place: Path) -> bool:
    with convert_write_errors(place):
        (place / "logs").mkdir(parents=True, exist_ok=True)
    case = runner.begin(model, options, place, want_inputs=False)
    return case.outcome is None and runner.compile(case, config).outcome is None


def _describe(
    dispatch: Dispatch, case: Case, options: Options, out: Path | None, board_options: Sequence[str]
) -> DispatchResult:
    finding = judge_case(case, options.rtol, options.atol)
    if _is_self_check(case):
        reason = f"agrees with {CPU_BACKEND}, which shares the compiler; numpy cannot evaluate {dispatch.not_evaluated}"
        finding = make_finding(Outcome.SKIP, reason, outputs=finding.outputs)
    run = ""
    if out is not None and finding.outcome not in (Outcome.PASS, Outcome.SKIP):
        if case.references:
            case = replace(case, options=replace(case.options, expected=dict(case.references[0].outputs)))
        keep_case(out, case, finding)
        run = repeat_command(out, case.name, list(board_options))
    counts = summarise_counts(case.result.instructions, cold=case.result.cold) if case.result is not None else None
    times = case.result.device_ns if case.result is not None and not case.result.cold else []
    return DispatchResult(
        key=dispatch.key,
        nodes=list(dispatch.nodes),
        op_types=list(dispatch.op_types),
        calls=dispatch.calls,
        inputs=record_specs(dispatch.inputs),
        outputs=record_specs(dispatch.outputs),
        against=CPU_BACKEND if dispatch.not_evaluated else NUMPY,
        finding=finding,
        device_p50_ns=statistics.median(times) if times else None,
        instructions=counts.median if counts is not None else None,
        compile_s=case.artifact.seconds if case.artifact is not None and not case.artifact.cached else None,
        run=run,
    )


def _is_self_check(case: Case) -> bool:
    """Return True if only a reference that shares the compiler agrees."""
    return (
        case.outcome is Outcome.REFERENCE_ERROR
        and bool(case.verdicts)
        and all(one and one.relation is Relation.SELF_CHECK for one in case.verdicts)
    )


def _describe_unsupported(dispatch: Dispatch) -> DispatchResult:
    return DispatchResult(
        key=dispatch.key,
        nodes=list(dispatch.nodes),
        op_types=list(dispatch.op_types),
        calls=dispatch.calls,
        finding=make_finding(Outcome.SKIP, f"cannot run alone: {dispatch.reason}"),
    )


def list_reasons(found: DispatchList) -> Iterator[str]:
    """Yield a line per reason why dispatches did not pass, with the dispatches."""
    alike: dict[str, list[str]] = {}
    for one in found.dispatches:
        if one.finding.outcome is not Outcome.PASS:
            alike.setdefault(f"{one.finding.outcome.value}: {one.finding.reason}", []).append(one.key)
    for reason, keys in alike.items():
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        yield f"{keys[0]}{more}, {reason}"

"""The one way through: import, compile, push, load, run, refer, compare, report.

The host's half (import, compile, inputs, references) of several models goes on in threads while the board, which
runs one program at a time, does its half in the caller's thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from hil import errors
from hil.compare.tolerance import check_tolerance
from hil.compare.verdict import compare, depends_on_noise, judge, too_far
from hil.controller.backends.compilers import compile_model
from hil.controller.backends.references import default_references, expected_result, refer_each, refer_with_fallback
from hil.controller.backends.references.noise import largest_noise, measure_noise
from hil.controller.backends.runtime_registry import compiler_for, runtime_for
from hil.controller.backends.targets import described, likely_cause
from hil.controller.devices.board_factory import AnyBoard, AnyProgram
from hil.controller.devices.board_resolver import BoardChoice
from hil.controller.models.importers import import_model
from hil.controller.models.inputs import make_inputs
from hil.controller.pipeline.capture import Capture
from hil.controller.pipeline.case import COMPILE_TIMEOUT_S, DEFAULT_TIMEOUT_S, Case, Options, Workshop, staged
from hil.controller.pipeline.element_types import comparable, tool_differs
from hil.controller.storage.runs import storing
from hil.core import clock
from hil.core.artifacts import Artifact
from hil.core.boards import BoardConfig
from hil.core.results import Outcome, RunResult, Stage, Verdict
from hil.core.tensors import Array, TensorSpec

# What happens to every case, in this order.
STAGES = (Stage.IMPORT, Stage.COMPILE, Stage.PUSH, Stage.LOAD, Stage.RUN, Stage.REFER, Stage.COMPARE)
# What the reference of the plain model is called among those that could not answer.
_PLAIN = "of the plain model"


def check_options(options: Options, choice: BoardChoice) -> None:
    """Refuse what cannot be meant, before anything is done.

    Raises:
        UsageError: a tolerance that cannot fail, a count or limit out of range.
    """
    check_tolerance(options.rtol, options.atol)
    if options.iterations < 1 or options.warmup < 0:
        raise errors.UsageError("--iterations must be at least 1 and --warmup at least 0")
    if not options.timeout > 0:
        raise errors.UsageError("--timeout must be above 0 seconds")
    runtime = options.runtime or choice.config.runtime
    if choice.config.devices and runtime not in choice.config.devices:
        raise errors.UsageError(
            f"board {choice.name} has no runtime {runtime!r}", hint=f"one of {', '.join(choice.config.devices)}"
        )


def begin(path: Path, options: Options, folder: Path, shop: Workshop, *, want_inputs: bool = True) -> Case:
    """Import a model and check the user's inputs against it: the stage that may still say "you typed it wrongly".

    A model that cannot be read is an outcome of its case; bad usage is raised.

    Raises:
        UsageError: missing file, unknown function, inputs that the model does not take.
    """
    case = Case(path.stem, path, options, folder)
    with staged(case, Stage.IMPORT):
        start = time.monotonic()
        case.model = import_model(
            path, function=options.function, dims=options.dims, isolated=shop.isolated, cache=shop.cache
        )
        case.timings = replace(case.timings, import_s=time.monotonic() - start)
        case.options = replace(options, runtime=runtime_for(case.model.format, options.runtime))
    if not want_inputs or case.model is None:
        return case
    if not (options.expected or options.references or default_references(case.model)):
        raise errors.UsageError(
            f"a {case.model.format} model has no reference to be compared with",
            hint="it has its own cases: hil bundle import FILE --from bpte, then hil bundle run"
            if path.suffix == ".bpte"
            else "give what you expect: --expected out.npy",
        )
    if case.model.inputs is not None:
        case.inputs = _inputs(case, case.model.inputs)
    return case


def prepare(case: Case, config: BoardConfig, shop: Workshop) -> Case:
    """Compile for a board, on the host, unless the case came with its program; its log says what was from the cache."""
    model = case.model
    if case.outcome or model is None or case.artifact is not None:
        return case
    runtime = case.options.runtime or config.runtime
    with staged(case, Stage.COMPILE):
        shop.watch(case, Stage.COMPILE, "")
        log = case.folder / "logs" / "compile.log"
        compiler = case.options.compiler or compiler_for(model.format, runtime)
        start = time.monotonic()
        case.artifact = compile_model(
            model,
            compiler=compiler,
            runtime=runtime,
            flags=(*config.compile_flags.get(compiler, ()), *case.options.compile_flags),
            cache=shop.cache,
            isolated=shop.isolated,
            recompute=case.options.recompute,
            debug_ir=case.options.debug_ir,
            timeout=COMPILE_TIMEOUT_S,
            log=log,
        )
        case.timings = replace(case.timings, compile_s=time.monotonic() - start)
        note = "from the cache" if case.artifact.cached else "done"
        with storing(log.parent), log.open("a") as file:
            file.write(f"{case.artifact.compiler}: {note}\n")
        shop.watch(case, Stage.COMPILE, note)
    return case


def execute(case: Case, board: AnyBoard, shop: Workshop) -> Case:
    """Push, load and run on the board."""
    artifact = case.artifact
    if artifact is not None and not case.outcome:
        _execute(case, artifact, board, shop)
        if case.error is not None and artifact.runtime == "iree":
            target = described(artifact.flags)
            # A simulated board is this machine: what was compiled for "host" fits it, whatever it plays.
            if not (board.info.get("simulated") and target.cpu == "host"):
                case.error.hint = likely_cause(case.error, target, board.info["machine"]) or case.error.hint
    return case


def _execute(case: Case, artifact: Artifact, board: AnyBoard, shop: Workshop) -> None:
    options = case.options
    with staged(case, Stage.PUSH):
        start = time.monotonic()
        shop.watch(case, Stage.PUSH, "")

        def pushed(sent: int, total: int) -> None:
            case.sent.append((clock.now_ns(), sent))
            shop.watch(case, Stage.PUSH, f"{sent >> 10} of {total >> 10} KiB")

        case.pushed_bytes = board.push(artifact, pushed)
        case.timings = replace(case.timings, push_s=time.monotonic() - start)
    if case.outcome:
        return
    program = _load(case, artifact, board, shop)
    if program is None:
        return
    with program, staged(case, Stage.RUN):
        shop.watch(case, Stage.RUN, "")
        if case.inputs is None:
            case.inputs = _inputs(case, program.loaded.inputs)
        shop.keep(case, "inputs")
        with Capture(board) if options.profile else nullcontext() as case.capture:
            _run(case, program, case.inputs, artifact, shop)
        if shop.logs:
            case.worker_log = program.log()


def _run(case: Case, program: AnyProgram, inputs: Mapping[str, Array], artifact: Artifact, shop: Workshop) -> None:
    options = case.options
    names = tuple(spec.name for spec in artifact.outputs or ())
    counts: dict[str, Any] = {"warmup": options.warmup, "iterations": options.iterations, "timeout": options.timeout}
    start = time.monotonic()
    case.result, call = program.run(inputs, names=names, **counts)
    spent = time.monotonic() - start
    case.timings = replace(
        case.timings,
        warmup_s=call.warmup_ns / 1e9 if options.warmup else None,
        # The warm-up is by the board's clock, which may jump.
        run_s=max(spent - call.fetch_s - call.warmup_ns / 1e9, 0.0),
        fetch_s=call.fetch_s,
    )
    shop.keep(case, "outputs")
    if case.capture is not None:
        case.capture.timed(call, inputs, case.result.outputs)
        shop.watch(case, Stage.RUN, "once more, under the profiler")
        case.capture.profile(program, inputs, **counts)


def _load(case: Case, artifact: Artifact, board: AnyBoard, shop: Workshop) -> AnyProgram | None:
    with staged(case, Stage.LOAD):
        start = time.monotonic()
        shop.watch(case, Stage.LOAD, "")
        program = board.load(artifact, timeout=case.options.timeout, no_fallback=case.options.no_fallback)
        case.timings = replace(case.timings, load_s=time.monotonic() - start)
        return program
    return None  # type: ignore[unreachable]  # mypy does not see that `staged` ends errors


def refer_case(case: Case, shop: Workshop) -> Case:
    """Ask the references, or take what the user expects. Where one cannot answer, the others' answers count."""
    if case.outcome or case.model is None or case.inputs is None:
        return case
    with staged(case, Stage.REFER):
        start = time.monotonic()
        shop.watch(case, Stage.REFER, "")
        options = case.options
        if options.expected:
            case.references = [expected_result(options.expected, case.model.outputs)]
        else:
            settings = _reference_settings(options, shop, case.folder / "logs" / "reference.log")
            if options.references:
                case.references, case.unanswered = refer_each(options.references, case.model, case.inputs, **settings)
            else:
                case.references = [refer_with_fallback(case.model, case.inputs, **settings)]
        try:
            case.plain_reference = _refer_plain(
                case.inputs, options, shop, case.folder / "logs" / "plain-reference.log"
            )
        except errors.StageError as error:
            case.unanswered[_PLAIN] = error
        case.timings = replace(case.timings, refer_s=time.monotonic() - start)
        shop.keep(case, "references")
    return case


def _refer_plain(inputs: Mapping[str, Array], options: Options, shop: Workshop, log: Path) -> RunResult | None:
    if options.plain_expected:
        return RunResult("expected, of the plain model", options.plain_expected)
    if options.plain_model is None:
        return None
    model = import_model(options.plain_model, dims=options.dims, isolated=shop.isolated, cache=shop.cache)
    return refer_with_fallback(model, inputs, **_reference_settings(options, shop, log))


def _reference_settings(options: Options, shop: Workshop, log: Path) -> dict[str, Any]:
    return {
        "cache": shop.cache,
        "isolated": shop.isolated,
        "recompute": options.recompute,
        "timeout": max(options.timeout, DEFAULT_TIMEOUT_S),
        "log": log,
    }


def conclude(case: Case, shop: Workshop) -> Case:
    """Compare and give the outcome."""
    if case.outcome or case.result is None:
        return case
    with staged(case, Stage.COMPARE):
        start = time.monotonic()
        shop.watch(case, Stage.COMPARE, "")
        tolerance = {name: getattr(case.options, name) for name in ("rtol", "atol", "allow_blind")}
        case.verdicts = _verdicts(case, case.result, tolerance)
        if case.options.atol is None and any(map(depends_on_noise, case.verdicts)):
            shop.watch(case, Stage.COMPARE, "measuring the reference's own noise")
            _allow_for_noise(case, case.result, tolerance, shop)
        between = [compare(other, case.references[0], **tolerance) for other in case.references[1:]]
        case.outcome, case.reason = judge(case.verdicts, between)
        first = comparable(case.result, case.references[0], case.model)
        if case and (reason := tool_differs(first, case.references[0], case.options.element_types, case.inputs or {})):
            case.outcome, case.reason = Outcome.FAIL, reason
        if case.plain_reference is not None:
            case.plain_verdict = compare(case.result, case.plain_reference)
            if case and (reason := too_far(case.plain_verdict, case.options.min_sqnr_db)):
                case.outcome, case.reason = Outcome.FAIL, reason
        silent = [f"the reference {name} could not answer: {why.message}" for name, why in case.unanswered.items()]
        case.reason = "; ".join(filter(None, (case.reason, *silent)))
        if case and case.options.min_sqnr_db is not None and _PLAIN in case.unanswered:
            why = case.unanswered[_PLAIN]
            what = f"how near the answer is to the plain model's cannot be told: {why.message}"
            raise errors.ReferenceFailed(what, stage=Stage.REFER.value, hint=why.hint, detail=why.detail)
        case.timings = replace(case.timings, compare_s=time.monotonic() - start)
    return case


def _verdicts(case: Case, result: RunResult, tolerance: Mapping[str, Any]) -> list[Verdict]:
    unseen = case.model.unseen if case.model is not None else ""
    return [
        _noting(compare(comparable(result, reference, case.model), reference, **tolerance), unseen)
        for reference in case.references
    ]


def _noting(verdict: Verdict, note: str) -> Verdict:
    """A verdict that, where it is a pass, also says what it says nothing about."""
    if not note or verdict.outcome is not Outcome.PASS:
        return verdict
    return replace(verdict, reason="; ".join(filter(None, (verdict.reason, note))))


def _allow_for_noise(case: Case, result: RunResult, tolerance: Mapping[str, Any], shop: Workshop) -> None:
    """Judge once more within the references' noise. Where that changes nothing, the verdicts stay as they are.

    Of several references the largest noise counts for each: it is the computation's, not one oracle's.
    """
    if case.model is None or case.inputs is None:
        return
    settings = _reference_settings(case.options, shop, case.folder / "logs" / "noise.log")
    noise = largest_noise([measure_noise(case.model, case.inputs, one, **settings) for one in case.references])
    first, case.references = case.references, [replace(one, noise=one.noise or noise) for one in case.references]
    verdicts = _verdicts(case, result, tolerance)
    if _judged(verdicts) == _judged(case.verdicts):
        case.references = first
    else:
        case.verdicts = verdicts


def _judged(verdicts: Sequence[Verdict]) -> list[tuple[bool, bool]]:
    """How every output was judged: one that is wrong beside it must not hide what noise explains of another."""
    return [(output.passed, output.blind) for verdict in verdicts for output in verdict.outputs]


def _inputs(case: Case, specs: Sequence[TensorSpec]) -> dict[str, Array]:
    options = case.options
    ranges = case.model.ranges if case.model else {}
    return make_inputs(
        specs, options.inputs, seed=options.seed, ranges=ranges, user_range=options.input_range, dims=options.dims
    )

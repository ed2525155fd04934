"""The one way through: import, compile, push, load, run, refer, compare, report.

The host's half (import, compile, inputs, references) of several models goes on in threads while the board, which
runs one program at a time, does its half in the caller's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hil import clock, errors
from hil.boards import BoardConfig
from hil.bundle import Artifact, Model
from hil.controller.cache import Cache
from hil.controller.choice import BoardChoice
from hil.controller.compare import check_tolerance, compare, judge, too_far
from hil.controller.compilers import compile_model
from hil.controller.importers import import_model
from hil.controller.inputs import make_inputs
from hil.controller.isolated import Isolated
from hil.controller.opening import AnyBoard, AnyProgram
from hil.controller.profile.capture import Capture
from hil.controller.profile.model import Span
from hil.controller.references import default_references, expected_result, refer, refer_with_fallback
from hil.controller.runs import storing
from hil.controller.targets import described, likely_cause
from hil.results import Outcome, RunResult, Stage, Timings, Verdict
from hil.tensors import Array, TensorSpec

# What happens to every case, in this order. Each is a method of Case below, which see.
STAGES = (Stage.IMPORT, Stage.COMPILE, Stage.PUSH, Stage.LOAD, Stage.RUN, Stage.REFER, Stage.COMPARE)

DEFAULT_TIMEOUT_S = 60.0
COMPILE_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Options:
    """How a model is to be run.

    Attributes:
        runtime: ``iree`` or ``onnxruntime``; "" is the board's own choice.
        compiler: makes the program; "" is the runtime's own.
        function: entry point; "" is the only one.
        dims: values of symbolic dimensions.
        inputs: texts of ``--input``, or name -> tensor.
        seed, input_range: of random inputs.
        references: oracles' names; empty is the default for the model's format.
        expected: texts of ``--expected``, or name -> tensor, that take the references' place.
        plain_model: the model as it was before it was quantised or the like: the answer is compared with its reference
            too, and that is told apart. None where there is none.
        plain_expected: name -> tensor that take that reference's place.
        min_sqnr_db: what every output must reach beside the plain model; None asks for nothing.
        rtol, atol: None is the dtype's default.
        iterations, warmup: timed and untimed runs.
        timeout: seconds for loading, for the runs together, and for each reference.
        compile_flags: added after the board's.
        debug_ir: folder for the compiler's IR.
        recompute: do not take artifacts or reference results from the cache.
        profile: run a second time under the runtime's profiler, and watch the board meanwhile.
    """

    runtime: str = ""
    compiler: str = ""
    function: str = ""
    dims: Mapping[str, int] = field(default_factory=dict)
    inputs: Sequence[str] | Mapping[str, Array] = ()
    seed: int = 0
    input_range: tuple[float, float] | None = None
    references: tuple[str, ...] = ()
    expected: Sequence[str] | Mapping[str, Array] = ()
    plain_model: Path | None = None
    plain_expected: Mapping[str, Array] = field(default_factory=dict)
    min_sqnr_db: float | None = None
    rtol: float | None = None
    atol: float | None = None
    iterations: int = 1
    warmup: int = 0
    timeout: float = DEFAULT_TIMEOUT_S
    compile_flags: tuple[str, ...] = ()
    debug_ir: Path | None = None
    recompute: bool = False
    profile: bool = False


@dataclass
class Case:
    """One model on its way; what a stage has not made yet is None. ``outcome`` is None until the case has ended.

    Attributes:
        spans: the stages as they took place, by the host's clock, in the order in which they ended.
        sent: (host time in ns, bytes of the upload sent until then).
        capture: the board's half of the profile, where one was asked for.
        profiles: those that were written: ``kind``, ``folder`` and ``notes`` of each.
    """

    name: str
    path: Path
    options: Options
    folder: Path
    model: Model | None = None
    artifact: Artifact | None = None
    inputs: dict[str, Array] | None = None
    result: RunResult | None = None
    references: list[RunResult] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    plain_reference: RunResult | None = None
    plain_verdict: Verdict | None = None
    outcome: Outcome | None = None
    stage: str = ""
    reason: str = ""
    error: errors.HilError | None = None
    timings: Timings = field(default_factory=Timings)
    pushed_bytes: int = 0
    worker_log: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    sent: list[tuple[int, int]] = field(default_factory=list)
    capture: Capture | None = None
    profiles: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.outcome is Outcome.PASS


Watch = Callable[[Case, Stage, str], None]


@dataclass(frozen=True)
class Workshop:
    """What cases share: the cache, the isolated processes, who is told of progress, and who stores what.

    Attributes:
        watch: called with (case, stage, note) whenever a stage begins or has news.
        keep: called with (case, what) when inputs, outputs or references are there, to store them.
        logs: whether to ask the board what a program that ran well wrote to stderr; a crash tells it anyway.
    """

    cache: Cache
    isolated: Isolated
    watch: Watch = lambda case, stage, note: None
    keep: Callable[[Case, str], None] = lambda case, what: None
    logs: bool = True


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
    with _stage(case, Stage.IMPORT):
        start = time.monotonic()
        case.model = import_model(
            path, function=options.function, dims=options.dims, isolated=shop.isolated, cache=shop.cache
        )
        case.timings = replace(case.timings, import_s=time.monotonic() - start)
    if not want_inputs or case.model is None:
        return case
    if not (options.expected or options.references or default_references(case.model)):
        raise errors.UsageError(
            f"a {case.model.format} model has no reference to be compared with",
            hint="give what you expect: --expected out.npy",
        )
    if case.model.inputs is not None:
        case.inputs = _inputs(case, case.model.inputs)
    return case


def prepare(case: Case, config: BoardConfig, shop: Workshop) -> Case:
    """Compile for a board, on the host; its log says so when there was nothing to do."""
    model = case.model
    if case.outcome or model is None:
        return case
    runtime = case.options.runtime or config.runtime
    with _stage(case, Stage.COMPILE):
        shop.watch(case, Stage.COMPILE, "")
        log = case.folder / "logs" / "compile.log"
        own = "none" if runtime == "onnxruntime" or model.format == "vmfb" else runtime
        compiler = case.options.compiler or own
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
    with _stage(case, Stage.PUSH):
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
    with program, _stage(case, Stage.RUN):
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
    with _stage(case, Stage.LOAD):
        start = time.monotonic()
        shop.watch(case, Stage.LOAD, "")
        program = board.load(artifact, timeout=case.options.timeout)
        case.timings = replace(case.timings, load_s=time.monotonic() - start)
        return program
    return None  # type: ignore[unreachable]  # mypy does not see that _stage ends errors


def refer_case(case: Case, shop: Workshop) -> Case:
    """Ask the references, or take what the user expects."""
    if case.outcome or case.model is None or case.inputs is None:
        return case
    with _stage(case, Stage.REFER):
        start = time.monotonic()
        shop.watch(case, Stage.REFER, "")
        options = case.options
        if options.expected:
            case.references = [expected_result(options.expected, case.model.outputs)]
        else:
            settings = _reference_settings(options, shop, case.folder / "logs" / "reference.log")
            if options.references:
                case.references = [refer(name, case.model, case.inputs, **settings) for name in options.references]
            else:
                case.references = [refer_with_fallback(case.model, case.inputs, **settings)]
        case.plain_reference = _refer_plain(case.inputs, options, shop, case.folder / "logs" / "plain-reference.log")
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
    with _stage(case, Stage.COMPARE):
        start = time.monotonic()
        shop.watch(case, Stage.COMPARE, "")
        tolerance = {"rtol": case.options.rtol, "atol": case.options.atol}
        case.verdicts = [compare(case.result, reference, **tolerance) for reference in case.references]
        between = [compare(other, case.references[0], **tolerance) for other in case.references[1:]]
        case.outcome, case.reason = judge(case.verdicts, between)
        if case.plain_reference is not None:
            case.plain_verdict = compare(case.result, case.plain_reference)
            if case and (reason := too_far(case.plain_verdict, case.options.min_sqnr_db)):
                case.outcome, case.reason = Outcome.FAIL, reason
        case.timings = replace(case.timings, compare_s=time.monotonic() - start)
    return case


def _inputs(case: Case, specs: Sequence[TensorSpec]) -> dict[str, Array]:
    options = case.options
    ranges = case.model.ranges if case.model else {}
    return make_inputs(
        specs, options.inputs, seed=options.seed, ranges=ranges, user_range=options.input_range, dims=options.dims
    )


@contextmanager
def _stage(case: Case, stage: Stage) -> Iterator[None]:
    """Run a stage; what it raises ends the case, but for bad usage, which is the user's."""
    case.stage = stage.value
    start = clock.now_ns()
    try:
        yield
    except errors.UsageError:
        raise
    except errors.HilError as error:
        end_case(case, error, stage)
    finally:
        case.spans.append(Span(stage.value, start, clock.now_ns()))


def end_case(case: Case, error: errors.HilError, stage: Stage) -> None:
    """End a case by an error; ``stage`` is where it happened, unless the error knows better."""
    error.located(stage=stage.value)
    case.error = error
    case.stage = error.stage
    case.outcome = Outcome(error.outcome or "RUN_ERROR")
    case.reason = error.message

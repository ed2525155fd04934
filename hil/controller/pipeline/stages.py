"""The stages of a case: import, compile, push, load, run, refer, compare.

Each stage takes a case and yields it anew with what it has made; the last one yielded goes on to the next stage. Where
a stage raises, what it had yielded until then stays with the case. :data:`PIPELINE` is what :mod:`.runner` executes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hil import errors
from hil.bundles.cases import check_loaded
from hil.compare.random_outputs import mark_random
from hil.compare.tolerance import check_tolerance
from hil.compare.verdict import Verdict, compare, depends_on_noise, disagreement, judge, too_far
from hil.controller.backends.compilers import compile_model
from hil.controller.backends.references import (
    expected_result,
    measure_noise,
    refer_each,
    references,
    run_reference_with_fallback,
)
from hil.controller.backends.references.noise import largest_noise
from hil.controller.devices.board import LoadedProgram
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_resolver import choose
from hil.controller.models.default_inputs import with_given_defaults
from hil.controller.models.importers import import_model
from hil.controller.models.inputs import make_inputs
from hil.controller.models.rewrite_check import check_rewrites
from hil.controller.models.sizes import range_text
from hil.controller.pipeline.accepting import load_rules
from hil.controller.pipeline.board_pool import BoardSession
from hil.controller.pipeline.capture import Capture
from hil.controller.pipeline.case import Case, ProgressSink
from hil.controller.pipeline.flagfiles import comparable, tool_differs
from hil.controller.pipeline.in_arithmetic import arithmetic_of, needs_control, with_control, without_other_control
from hil.controller.pipeline.independence import hint_for_independence, not_asked, only_dependent, refusals, runtime_of
from hil.controller.pipeline.options import COMPILE_TIMEOUT_S, Job, Options
from hil.controller.pipeline.repeated import (
    compile_repeatedly,
    instability,
    judge_answers,
    run_repeatedly,
    with_profile,
)
from hil.controller.storage.cache import Cache
from hil.controller.storage.packages import pick
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.runs import COMPILE_FAILURE, storing
from hil.core import clock
from hil.core.board_config import BoardConfig
from hil.core.results import Artifact, Outcome, Relation, RunResult, Stage
from hil.core.runtimes import compiler_for, runtime_for
from hil.core.tensors import Array, TensorSpec, read_as

# What the reference of the plain model is called among those that could not answer.
_PLAIN = "of the plain model"


@dataclass(frozen=True)
class Tools:
    """What stages work with."""

    context: RunContext
    config: BoardConfig | None = None  # of the board that the case is compiled for; None until that is known
    session: BoardSession | None = None  # the board that the case runs on; None for the stages that need none
    sink: ProgressSink = field(default_factory=ProgressSink)
    lasting: bool = True  # whether the folders of cases stay when all is over
    logs: bool = True  # whether to ask the board what a program that ran well wrote to stderr; a crash tells it anyway


def check_options(options: Options, choice: BoardChoice, *, takes_ranges: bool = False) -> None:
    """Refuse (UsageError), before anything is done, what cannot be meant.

    Args:
        takes_ranges: whether there may be several cases of a model, one for each size of a range.
    """
    if not takes_ranges:
        refuse_ranges(options)
    check_tolerance(options.rtol, options.atol)
    load_rules(options.accept)
    if options.iterations < 1 or options.warmup < 0:
        raise errors.UsageError("--iterations must be at least 1 and --warmup at least 0")
    if options.repeat < 1 or options.recompile < 1:
        raise errors.UsageError("--repeat and --recompile must be at least 1")
    if options.fresh_load and options.repeat == 1:
        raise errors.UsageError("--fresh-load needs --repeat", hint="for example --repeat 5 --fresh-load")
    if options.debug_ir_passes and options.debug_ir is None:
        raise errors.UsageError("--debug-ir-passes needs a folder for the IR", hint="--debug-ir DIR --debug-ir-passes")
    if not options.timeout > 0:
        raise errors.UsageError("--timeout must be above 0 seconds")
    for name in options.references:
        pick("reference", references(), name)
    runtime = options.runtime or choice.config.runtime
    if choice.config.devices and runtime not in choice.config.devices:
        raise errors.UsageError(
            f"board {choice.name} has no runtime {runtime!r}", hint=f"one of {', '.join(choice.config.devices)}"
        )


def refuse_ranges(options: Options) -> None:
    """Raise UsageError where a dimension has a range of sizes in place of a size."""
    for name, sizes in options.dim_ranges.items():
        raise errors.UsageError(
            f"--dim {name}={range_text(sizes)} is a range of sizes, and this takes one size",
            hint=f"--dim {name}={sizes[1]}; hil run, hil suite run, hil bundle create and pytest take ranges",
        )


def choice_of(job: Job, *, takes_ranges: bool = False) -> BoardChoice:
    """The board that a job is for; UsageError where there is none, or it cannot do what is asked for.

    Args:
        takes_ranges: as :func:`check_options` has it.
    """
    keys = {name: getattr(job, name) for name in ("identity", "known_hosts", "accept_new_host_key")}
    choice = choose(job.board, job.hw_type, **keys)
    check_options(job.options(), choice, takes_ranges=takes_ranges)
    return choice


def _import(case: Case, tools: Tools) -> Iterator[Case]:
    """Read the model's file."""
    context, options = tools.context, case.options
    start = time.monotonic()
    model = import_model(
        case.path, function=options.function, dims=options.dims, isolated=context.isolated, cache=context.cache
    )
    model, inputs = with_given_defaults(model, options.inputs, context)
    options = replace(options, runtime=runtime_for(model.format, options.runtime), inputs=inputs)
    yield replace(case, model=model, options=options).timed(import_s=time.monotonic() - start)


def _compile(case: Case, tools: Tools) -> Iterator[Case]:
    """Compile for a board, on the host; the log says what was from the cache."""
    model, config, context = case.model, tools.config, tools.context
    assert model is not None and config is not None
    runtime = case.options.runtime or config.runtime
    tools.sink.stage(case, Stage.COMPILE, "")
    log = case.folder / "logs" / "compile.log"
    compiler = case.options.compiler or compiler_for(model.format, runtime)
    start = time.monotonic()
    order: dict[str, Any] = {
        "compiler": compiler,
        "runtime": runtime,
        "flags": (*config.compile_flags.get(compiler, ()), *case.options.compile_flags),
        "isolated": context.isolated,
        "recompute": case.options.recompute,
        "debug_ir": case.options.debug_ir,
        "debug_ir_passes": case.options.debug_ir_passes,
        "failure": case.folder / "logs" / COMPILE_FAILURE if tools.lasting else None,
        "timeout": COMPILE_TIMEOUT_S,
        "log": log,
    }
    artifact = compile_model(model, cache=context.cache, **order)
    if (count := case.options.recompile) > 1:

        def again(folder: Path) -> Artifact:
            tools.sink.stage(case, Stage.COMPILE, f"{folder.name} of {count}")
            return compile_model(model, cache=Cache(folder), **{**order, "debug_ir": None, "debug_ir_passes": False})

        compilations = compile_repeatedly(artifact, count, again, case.folder / "recompiled")
        case = replace(case, compilations=compilations)
    yield (case := replace(case, artifact=artifact).timed(compile_s=time.monotonic() - start))
    note = "from the cache" if artifact.cached else "done"
    with storing(log.parent), log.open("a") as file:
        file.write(f"{artifact.compiler}: {note}\n")
    tools.sink.stage(case, Stage.COMPILE, note)


def _push(case: Case, tools: Tools) -> Iterator[Case]:
    """Send what the board lacks of the program."""
    artifact, session = case.artifact, tools.session
    assert artifact is not None and session is not None
    start = time.monotonic()
    tools.sink.stage(case, Stage.PUSH, "")
    sent: list[tuple[int, int]] = []

    def pushed(done: int, total: int) -> None:
        sent.append((clock.now_ns(), done))
        tools.sink.stage(case, Stage.PUSH, f"{done >> 10} of {total >> 10} KiB")

    size = session.board.push(artifact, pushed)
    yield replace(case, pushed_bytes=size, sent=tuple(sent)).timed(push_s=time.monotonic() - start)


def _load(case: Case, tools: Tools) -> Iterator[Case]:
    """Load the program in a worker on the board, unless it has stayed loaded there."""
    artifact, session, options = case.artifact, tools.session, case.options
    assert artifact is not None and session is not None
    start = time.monotonic()
    tools.sink.stage(case, Stage.LOAD, "")

    def check(program: LoadedProgram) -> None:
        if case.signature is not None:
            check_loaded(artifact.function, case.signature, program.loaded.inputs)

    _, loaded = session.load(artifact, timeout=options.timeout, no_fallback=options.no_fallback, check=check)
    if loaded:
        yield case.timed(load_s=time.monotonic() - start)


def _run(case: Case, tools: Tools) -> Iterator[Case]:
    """Run on the board; where a profile is asked for, once more under the profiler."""
    artifact, session, options = case.artifact, tools.session, case.options
    assert artifact is not None and session is not None
    broken = False
    try:
        program, _ = session.load(artifact, timeout=options.timeout, no_fallback=options.no_fallback)
        tools.sink.stage(case, Stage.RUN, "")
        if case.inputs is None:
            yield (case := replace(case, inputs=make_case_inputs(case, program.loaded.inputs)))
        inputs = case.inputs or {}
        tools.sink.keep(case, "inputs")
        with Capture(session.board) if options.profile else nullcontext() as capture:
            if capture is not None:
                yield (case := replace(case, capture=capture))
            counts: dict[str, Any] = {name: getattr(options, name) for name in ("warmup", "iterations", "timeout")}
            start = time.monotonic()
            others = case.compilations.programs if case.compilations is not None else ()
            program, result, call = run_repeatedly(session, artifact, others, inputs, options)
            spent = time.monotonic() - start
            if case.signature is not None:
                result = _as_signed(result, program.loaded.outputs, case.signature.outputs)
            if arithmetic := options.arithmetic or session.board.config.arithmetic_of(artifact.runtime):
                result = replace(result, provenance={**result.provenance, "arithmetic": arithmetic})
            case = replace(case, result=result).timed(
                warmup_s=call.warmup_ns / 1e9 if options.warmup else None,
                # The warm-up is by the board's clock, which may jump.
                run_s=max(spent - call.fetch_s - call.warmup_ns / 1e9, 0.0),
                fetch_s=call.fetch_s,
            )
            yield case
            tools.sink.keep(case, "outputs")
            if capture is not None:
                capture.timed(call, inputs, result.outputs)
                tools.sink.stage(case, Stage.RUN, "once more, under the profiler")
                capture.profile(program, inputs, **counts)
                yield (case := replace(case, result=with_profile(result, capture.taken)))
        if tools.logs:
            yield replace(case, worker_log=tuple(program.log()))
    except (errors.RunCrashed, errors.StageTimeout):
        broken = True
        raise
    finally:
        session.after_run(artifact, broken=broken)


def _as_signed(result: RunResult, own: Sequence[TensorSpec], signed: Sequence[TensorSpec]) -> RunResult:
    """The result with integers of which the program does not say whether they have a sign as the signature says."""
    if not len(result.outputs) == len(own) == len(signed):
        return result

    def converted(outputs: Mapping[str, Array]) -> dict[str, Array]:
        triples = zip(outputs.items(), own, signed, strict=True)
        return {name: read_as(array, spec.dtype, one) for (name, array), one, spec in triples}

    repetition = result.repetition and result.repetition.converted(converted)
    return replace(result, outputs=converted(result.outputs), repetition=repetition)


def _run_reference(case: Case, tools: Tools) -> Iterator[Case]:
    """Ask the references, or take what is expected. Where one cannot answer, the others' answers count."""
    context, options = tools.context, case.options
    model, inputs = case.model, case.inputs
    assert model is not None and inputs is not None
    start = time.monotonic()
    tools.sink.stage(case, Stage.REFER, "")
    settings = _reference_settings(options, context, case.folder / "logs" / "reference.log")
    answers = [expected_result(options.expected, model.outputs)] if options.expected else []
    unanswered: Mapping[str, errors.StageError] = {}
    runtime = runtime_of(case, tools.config)
    if options.references:
        try:
            more, unanswered = refer_each(options.references, model, inputs, runtime=runtime, **settings)
            answers += more
        except (errors.StageError, errors.UsageError) as error:
            if not answers:
                raise
            failed = errors.ReferenceFailed(error.message, hint=error.hint, detail=error.detail)
            unanswered = {", ".join(options.references): failed}
    elif not answers:
        answer, unanswered = run_reference_with_fallback(model, inputs, runtime=runtime, **settings)
        answers.append(answer)
    if _is_rewritten(case, answers):
        check_rewrites(model, inputs, **settings)
    yield (case := replace(case, references=tuple(answers), unanswered=unanswered))
    try:
        log = case.folder / "logs" / "plain-reference.log"
        case = replace(case, plain_reference=_refer_plain(inputs, options, context, log))
    except errors.StageError as error:
        case = replace(case, unanswered={**case.unanswered, _PLAIN: error})
    yield (case := case.timed(refer_s=time.monotonic() - start))
    tools.sink.keep(case, "references")


def _is_rewritten(case: Case, answers: Sequence[RunResult]) -> bool:
    """Return whether the program or an answer is of a model that hil rewrote, which it does for IREE's importer."""
    compilers = [case.artifact.compiler if case.artifact is not None else ""]
    compilers += [str(answer.provenance.get("reference", "")) for answer in answers]
    is_onnx = case.model is not None and case.model.format == "onnx"
    return is_onnx and any(compiler.startswith("iree") for compiler in compilers)


def _refer_plain(inputs: Mapping[str, Array], options: Options, context: RunContext, log: Path) -> RunResult | None:
    if options.plain_expected:
        return RunResult("expected, of the plain model", options.plain_expected)
    if options.plain_model is None:
        return None
    model = import_model(options.plain_model, dims=options.dims, isolated=context.isolated, cache=context.cache)
    settings = _reference_settings(options, context, log)
    if options.references:
        return refer_each(options.references, model, inputs, **settings)[0][0]
    return run_reference_with_fallback(model, inputs, **settings)[0]


def _reference_settings(options: Options, context: RunContext, log: Path) -> dict[str, Any]:
    return {
        "cache": context.cache,
        "isolated": context.isolated,
        "recompute": options.recompute,
        "timeout": options.timeout,
        "log": log,
    }


def _compare(case: Case, tools: Tools) -> Iterator[Case]:
    """Compare with the references and give the outcome."""
    try:
        for judged in _judge(case, tools):
            yield judged
    except errors.VacuousTolerance as error:
        if not case.options.replace_blind_tolerance:
            raise
        case = replace(case, options=replace(case.options, rtol=None, atol=None))
        for judged in _judge(case, tools):
            yield (case := judged)
        note = f"judged within hil's default tolerances: {error.message}"
        yield replace(case, reason="; ".join(filter(None, (case.reason, note))))


def _judge(case: Case, tools: Tools) -> Iterator[Case]:
    context, options, result = tools.context, case.options, case.result
    assert result is not None
    start = time.monotonic()
    tools.sink.stage(case, Stage.COMPARE, "")
    tolerance = _tolerance(options)
    case = without_other_control(case)
    case = replace(case, verdicts=_verdicts(case, result, case.references, tolerance))
    if needs_control(case):
        yield case
        tools.sink.stage(case, Stage.COMPARE, f"computing the model in {arithmetic_of(result)}")
        case = with_control(case, _reference_settings(options, context, case.folder / "logs" / "control.log"))
        tolerance |= {"rtol": None, "atol": None}
        case = replace(case, verdicts=_verdicts(case, result, case.references, tolerance))
    if tolerance["atol"] is None and any(map(depends_on_noise, case.verdicts)):
        tools.sink.stage(case, Stage.COMPARE, "measuring the reference's own noise")
        case = _allow_for_noise(case, result, tolerance, context)
    yield case
    one, *others = case.references
    # References compute in float32, whatever the board does.
    plain = replace(one, control={})
    between = [_marked(case, compare(comparable(other, one, case.model), plain, **tolerance)) for other in others]
    outcome, reason = judge(case.verdicts, between)
    case = replace(case, disagreement=disagreement(case.verdicts, between))
    if options.expected and outcome is Outcome.PASS and case.verdicts[0].outcome is Outcome.FAIL:
        # What the user expects is no oracle that others could outvote.
        outcome, reason = Outcome.FAIL, f"{case.verdicts[0].reason}; {reason}"
    passed = outcome is Outcome.PASS
    first = comparable(result, one, case.model)
    declared, types = (case.model and case.model.outputs) or (), options.element_types
    if passed and (differs := tool_differs(first, one, types, case.inputs or {}, declared)):
        outcome, reason, passed = Outcome.FAIL, differs, False
    if case.plain_reference is not None:
        case = replace(case, plain_verdict=compare(result, case.plain_reference))
        assert case.plain_verdict is not None
        if passed and (far := too_far(case.plain_verdict, options.min_sqnr_db)):
            outcome, reason, passed = Outcome.FAIL, far, False
    runtime = runtime_of(case, tools.config)
    if passed and options.require_independent and (weak := only_dependent(case.verdicts)):
        outcome, passed, reason = Outcome.REFERENCE_ERROR, False, weak
    if outcome is Outcome.REFERENCE_ERROR:
        reason = "; ".join(filter(None, (reason, not_asked(case, runtime))))
    evidence, rest = refusals(case, runtime)
    case = replace(case, outcome=outcome, reason="; ".join(filter(None, (*evidence, reason, *rest))))
    case = judge_repetition(case)
    passed = case.outcome is Outcome.PASS
    yield case
    if case.outcome is Outcome.REFERENCE_ERROR:
        raise errors.ReferenceFailed(case.reason, stage=Stage.REFER.value, hint=hint_for_independence(case, runtime))
    if passed and options.min_sqnr_db is not None and _PLAIN in case.unanswered:
        why = case.unanswered[_PLAIN]
        what = f"how near the answer is to the plain model's cannot be told: {why.message}"
        raise errors.ReferenceFailed(what, stage=Stage.REFER.value, hint=why.hint, detail=why.detail)
    yield case.timed(compare_s=time.monotonic() - start)


def _tolerance(options: Options) -> dict[str, Any]:
    within = {name: getattr(options, name) for name in ("rtol", "atol", "allow_blind", "allow_flush")}
    return {**within, "accept": load_rules(options.accept)}


def judge_repetition(case: Case) -> Case:
    """The case with the answers judged that differ between its iterations: UNSTABLE, unless they may differ."""
    result, tolerance = case.result, _tolerance(case.options)
    repetition = result.repetition if result is not None else None
    if result is None or repetition is None or repetition.is_stable or case.error is not None:
        return case

    def judged(outputs: Mapping[str, Array]) -> Verdict:
        verdicts = _verdicts(case, replace(result, outputs=outputs), case.references, tolerance)
        strongest = [one for one in verdicts if one.relation is not Relation.SELF_CHECK] or verdicts
        return next((one for one in strongest if not one), strongest[0])

    verdicts = judge_answers(repetition, judged) if case.references else {}
    is_unstable, text = instability(repetition, verdicts, case.model, case.options.allow_unstable)
    case = replace(case, answer_verdicts=verdicts)
    if is_unstable:
        return replace(case, outcome=Outcome.UNSTABLE, reason=text)
    return replace(case, reason="; ".join(filter(None, (case.reason, text))))


def _verdicts(
    case: Case, result: RunResult, references: Sequence[RunResult], tolerance: Mapping[str, Any]
) -> tuple[Verdict, ...]:
    """The verdicts; those that are a pass also say what they say nothing about."""
    unseen = case.model.unseen if case.model is not None else ""
    verdicts = [_marked(case, compare(comparable(result, one, case.model), one, **tolerance)) for one in references]
    return tuple(
        replace(one, reason="; ".join(filter(None, (one.reason, unseen)))) if one.outcome is Outcome.PASS else one
        for one in verdicts
    )


def _marked(case: Case, verdict: Verdict) -> Verdict:
    """The verdict, where the model draws random numbers with the outputs that depend on them marked."""
    if case.model is None:
        return verdict
    return mark_random(verdict, case.model.random, case.model.random_outputs, case.options.allow_blind)


def _allow_for_noise(case: Case, result: RunResult, tolerance: Mapping[str, Any], context: RunContext) -> Case:
    """Judge once more within the references' noise. Where that changes nothing, the verdicts stay as they are.

    Of several references the largest noise counts for each: it is the computation's, not one oracle's.
    """
    if case.model is None or case.inputs is None:
        return case
    settings = _reference_settings(case.options, context, case.folder / "logs" / "noise.log")
    noise = largest_noise([measure_noise(case.model, case.inputs, one, **settings) for one in case.references])
    references = tuple(replace(one, noise=one.noise or noise) for one in case.references)
    verdicts = _verdicts(case, result, references, tolerance)
    if _judged(verdicts) == _judged(case.verdicts):
        return case
    return replace(case, references=references, verdicts=verdicts)


def _judged(verdicts: Sequence[Verdict]) -> list[tuple[bool, bool]]:
    """How every output was judged: one that is wrong beside it must not hide what noise explains of another."""
    return [(output.passed, output.blind) for verdict in verdicts for output in verdict.outputs]


def make_case_inputs(case: Case, specs: Sequence[TensorSpec]) -> Mapping[str, Array]:
    """A case's inputs for these specs: what the user gave (UsageError: it does not fit), the rest seeded random."""
    if case.make_inputs is not None:
        return case.make_inputs(specs)
    options = case.options
    ranges = case.model.ranges if case.model else {}
    return make_inputs(
        specs, options.inputs, seed=options.seed, ranges=ranges, user_range=options.input_range, dims=options.dims
    )


@dataclass(frozen=True)
class Step:
    """One stage of the pipeline."""

    stage: Stage
    run: Callable[[Case, Tools], Iterator[Case]]
    needed: Callable[[Case], bool]


def _has_program(case: Case) -> bool:
    return case.artifact is not None


# What happens to every case, in this order.
PIPELINE = (
    Step(Stage.IMPORT, _import, lambda case: case.model is None),
    Step(Stage.COMPILE, _compile, lambda case: case.model is not None and case.artifact is None),
    Step(Stage.PUSH, _push, _has_program),
    Step(Stage.LOAD, _load, _has_program),
    Step(Stage.RUN, _run, _has_program),
    Step(Stage.REFER, _run_reference, lambda case: not case.references and None not in (case.model, case.inputs)),
    Step(Stage.COMPARE, _compare, lambda case: case.result is not None and bool(case.references)),
)
STAGES = tuple(step.stage for step in PIPELINE)

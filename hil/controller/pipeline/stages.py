"""Define the stages of a case: import, compile, push, load, run, refer, compare.

A stage takes a case and yields updated cases. The last yielded case goes to the next stage. If a stage raises, the case
has the updates that were yielded before. :mod:`.runner` executes :data:`PIPELINE`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hil import errors
from hil.bundles.cases import Signature, check_loaded
from hil.compare.tolerance import check_tolerance
from hil.controller.backends.compilers import compile_model
from hil.controller.backends.gpu_targets import combine_flags
from hil.controller.backends.references import (
    load_references,
    read_expected,
    refer_each,
    run_reference_with_fallback,
)
from hil.controller.devices.board_choice import BoardChoice, make_mcu_runtime_error, use_device
from hil.controller.devices.choosing.board_resolver import choose
from hil.controller.devices.loaded_program import LoadedProgram
from hil.controller.models.default_inputs import add_given_defaults
from hil.controller.models.generation.decode import choose_importer
from hil.controller.models.importers import import_model
from hil.controller.models.inputs import make_inputs
from hil.controller.models.onnx_files.rewrite_check import check_rewrites, is_rewritten
from hil.controller.models.sizing.sizes import format_range
from hil.controller.pipeline.capture import CaptureRecorder
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.compilations import compile_repeatedly
from hil.controller.pipeline.energy_stage import add_energy
from hil.controller.pipeline.measurement_grade import grade_run, is_measured, watch_run
from hil.controller.pipeline.repeated import add_profile_pass, load_arguments, make_steps_arguments, run_repeatedly
from hil.controller.pipeline.settings.options import COMPILE_TIMEOUT_SECONDS, Job, Options, check_counts
from hil.controller.pipeline.tools import Tools, make_reference_settings
from hil.controller.pipeline.verdicts.accepting import load_rules
from hil.controller.pipeline.verdicts.independence import get_runtime
from hil.controller.pipeline.verdicts.judging import PLAIN, compare_case
from hil.controller.storage.cache import Cache
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.runs import COMPILE_FAILURE, convert_write_errors
from hil.controller.storage.sources.packages import pick
from hil.core import clock
from hil.core.arithmetic import FLOAT32
from hil.core.board_config import BoardConfig
from hil.core.results import Artifact, Model, RunResult, Stage
from hil.core.runtimes import NO_COMPILER, choose_compiler, choose_runtime
from hil.core.tensors import Array, TensorSpec, read_as


def check_options(options: Options, choice: BoardChoice, *, takes_ranges: bool = False) -> None:
    """Validate the options before any work. Raises UsageError.

    Args:
        takes_ranges: True if a range of sizes is allowed. The model then has a case for every size.
    """
    if not takes_ranges:
        refuse_ranges(options)
    check_tolerance(options.rtol, options.atol)
    load_rules(options.accept)
    check_counts(options)
    if options.fresh_load and options.repeat == 1:
        raise errors.UsageError("--fresh-load requires --repeat", hint="for example --repeat 5 --fresh-load")
    if options.debug_ir_passes and options.debug_ir is None:
        raise errors.UsageError("--debug-ir-passes requires --debug-ir", hint="use --debug-ir DIR --debug-ir-passes")
    if not options.timeout > 0:
        raise errors.UsageError("--timeout must be above 0 seconds")
    for name in options.references:
        pick("reference", load_references(), name)
    runtime = options.runtime or choice.config.runtime
    if not choice.config.has_runtime(runtime):
        if choice.config.mcu is not None:
            raise make_mcu_runtime_error(choice.name, runtime)
        raise errors.UsageError(
            f"board {choice.name} does not support runtime {runtime!r}",
            hint=f"{errors.did_you_mean(runtime, choice.config.devices)}"
            f"configured runtimes: {', '.join(choice.config.devices)}",
        )


def refuse_ranges(options: Options) -> None:
    """Raise UsageError if a dimension has a range of sizes instead of a size."""
    for name, sizes in options.dim_ranges.items():
        raise errors.UsageError(
            f"--dim {name}={format_range(sizes)} is a range, expected a single size",
            hint=f"use --dim {name}={sizes[1]}; hil run, hil suite run, hil bundle create and pytest support ranges",
        )


def choose_board(job: Job, *, takes_ranges: bool = False) -> BoardChoice:
    """Return the board for a job. Raises UsageError if the board does not exist or does not support the options.

    Args:
        takes_ranges: See :func:`check_options`.
    """
    keys = {name: getattr(job, name) for name in ("identity", "known_hosts", "accept_new_host_key")}
    choice = use_device(choose(job.board, job.hw_type, **keys), job.runtime, job.device)
    check_options(job.make_options(), choice, takes_ranges=takes_ranges)
    return choice


def _import_model(case: Case, tools: Tools) -> Iterator[Case]:
    """Import the model."""
    context, options = tools.context, case.options
    start = time.monotonic()
    model = choose_importer(options.generate)(
        case.path, function=options.function, dims=options.dims, isolated=context.isolated, cache=context.cache
    )
    model, inputs = add_given_defaults(model, options.inputs, context)
    options = replace(options, runtime=choose_runtime(model.format, options.runtime), inputs=inputs)
    case = replace(case, model=model, options=options)
    if options.generate is not None:
        from hil.controller.pipeline.decoding.generation import begin_generation

        case = begin_generation(case, context)
    yield case.with_timings(import_s=time.monotonic() - start)


def choose_case_compiler(case: Case, model: Model, config: BoardConfig) -> str:
    """Return the name of the compiler of a case's model."""
    return case.options.compiler or choose_compiler(model.format, case.options.runtime or config.runtime)


def needs_compiler(case: Case, config: BoardConfig) -> bool:
    """Return whether a case still needs a compiler. Without one, the board loads the model's file."""
    if case.outcome or case.artifact or case.model is None:
        return False
    return choose_case_compiler(case, case.model, config) != NO_COMPILER


def _compile_program(case: Case, tools: Tools) -> Iterator[Case]:
    """Compile the model on the host. The log shows if the program came from the cache."""
    model, config, context = case.model, tools.config, tools.context
    assert model is not None and config is not None
    runtime = case.options.runtime or config.runtime
    check_device_is_used(case, config)
    tools.sink.stage(case, Stage.COMPILE, "")
    log = case.folder / "logs" / "compile.log"
    compiler = choose_case_compiler(case, model, config)
    start = time.monotonic()
    order: dict[str, Any] = {
        "compiler": compiler,
        "runtime": runtime,
        "flags": combine_flags(config.compile_flags.get(compiler, ()), case.options.compile_flags),
        "isolated": context.isolated,
        "recompute": case.options.recompute,
        "debug_ir": case.options.debug_ir,
        "debug_ir_passes": case.options.debug_ir_passes,
        "failure": case.folder / "logs" / COMPILE_FAILURE if tools.lasting else None,
        "timeout": COMPILE_TIMEOUT_SECONDS,
        "log": log,
    }
    artifact = compile_model(model, cache=context.cache, **order)
    if (count := case.options.recompile) > 1:

        def compile_again(folder: Path) -> Artifact:
            tools.sink.stage(case, Stage.COMPILE, f"{folder.name} of {count}")
            return compile_model(model, cache=Cache(folder), **{**order, "debug_ir": None, "debug_ir_passes": False})

        compilations = compile_repeatedly(artifact, count, compile_again, case.folder / "recompiled")
        case = replace(case, compilations=compilations)
    yield (case := replace(case, artifact=artifact).with_timings(compile_s=time.monotonic() - start))
    note = "from the cache" if artifact.cached else "done"
    with convert_write_errors(log.parent), log.open("a") as file:
        file.write(f"{artifact.compiler}: {note}\n")
    tools.sink.stage(case, Stage.COMPILE, note)


def check_device_is_used(case: Case, config: BoardConfig) -> None:
    """Raise UsageError if the device was selected for another runtime than the runtime of the model's format."""
    device, runtime = case.options.device, case.options.runtime or config.runtime
    if device and config.devices.get(runtime, "") != device:
        raise errors.UsageError(
            f"--device {device} does not apply to the runtime {runtime} of {case.path.name}",
            hint=f"if {device} is a device of this runtime, add --runtime {runtime}; otherwise run this model without "
            "--device",
            option="--runtime",
        )


def _push_program(case: Case, tools: Tools) -> Iterator[Case]:
    """Send those files of the program that are not on the board."""
    artifact, session = case.artifact, tools.session
    assert artifact is not None and session is not None
    start = time.monotonic()
    tools.sink.stage(case, Stage.PUSH, "")
    sent: list[tuple[int, int]] = []

    def report_progress(done: int, total: int) -> None:
        sent.append((clock.get_time_ns(), done))
        tools.sink.stage(case, Stage.PUSH, f"{done >> 10} of {total >> 10} KiB")

    size = session.board.push(artifact, report_progress)
    yield replace(case, pushed_bytes=size, sent=tuple(sent)).with_timings(push_s=time.monotonic() - start)


def _load_program(case: Case, tools: Tools) -> Iterator[Case]:
    """Load the program in a worker on the board, unless it is already loaded."""
    artifact, session, options = case.artifact, tools.session, case.options
    assert artifact is not None and session is not None
    start = time.monotonic()
    tools.sink.stage(case, Stage.LOAD, "")

    def check(program: LoadedProgram) -> None:
        if case.signature is not None:
            check_loaded(artifact.function, case.signature, program.loaded.inputs)

    _, loaded = session.load(artifact, **load_arguments(options), check=check)
    if loaded:
        yield case.with_timings(load_s=time.monotonic() - start)


def _run_program(case: Case, tools: Tools) -> Iterator[Case]:
    """Run on the board and, if a profile is requested, run a second time under the profiler."""
    artifact, session, options = case.artifact, tools.session, case.options
    assert artifact is not None and session is not None
    broken = False
    try:
        program, _ = session.load(artifact, **load_arguments(options))
        tools.sink.stage(case, Stage.RUN, "")
        if is_measured(case) or options.profile:
            session.board.prepare()
        if case.inputs is None:
            yield (case := replace(case, inputs=make_case_inputs(case, program.loaded.inputs)))
        inputs = case.inputs or {}
        tools.sink.keep(case, "inputs")
        with CaptureRecorder(session.board) if options.profile else nullcontext() as recorder:
            if recorder is not None:
                yield (case := replace(case, capture=recorder.capture))
            counts: dict[str, Any] = {name: getattr(options, name) for name in ("warmup", "iterations", "timeout")}
            others = case.compilations.programs if case.compilations is not None else ()
            with watch_run(case, session.board) as watch:
                start = time.monotonic()
                program, result, call = run_repeatedly(
                    session, artifact, others, inputs, options, **make_steps_arguments(case)
                )
                spent = time.monotonic() - start
            convert = _make_sign_converter(program.loaded.outputs, case.signature)
            result = replace(
                result,
                outputs=convert(result.outputs),
                repetition=result.repetition and result.repetition.convert(convert),
            )
            config = session.board.config
            arithmetic = options.arithmetic or config.get_arithmetic(artifact.runtime)
            if arithmetic := arithmetic or (FLOAT32 if config.is_exact else ""):
                result = replace(result, provenance={**result.provenance, "arithmetic": arithmetic})
            case = replace(case, result=result).with_timings(
                warmup_s=call.warmup_ns / 1e9 if options.warmup and session.board.config.has_time else None,
                # Not below 0: the warm-up time is from the board's clock, which may jump.
                run_s=max(spent - call.fetch_s - call.warmup_ns / 1e9, 0.0),
                fetch_s=call.fetch_s,
            )
            if watch is not None:
                case = grade_run(case, watch, call)
            if case.decoder is not None:
                from hil.controller.pipeline.decoding.generation import check_generation, run_prefill

                check_generation(case := replace(case, calls=call.calls, link_ns=call.link_ns))
            yield case
            tools.sink.keep(case, "outputs")
            if case.decoder is not None:
                yield (case := run_prefill(case, program))
            if recorder is not None:
                recorder.record_run(call, inputs, result.outputs)
                tools.sink.stage(case, Stage.RUN, "second run, with the profiler")
                recorder.profile(program, inputs, **counts)
                yield (case := replace(case, result=add_profile_pass(result, recorder.capture.taken, convert)))
        if options.energy:
            tools.sink.stage(case, Stage.RUN, "measuring the energy")
            session.board.prepare()
            yield (case := add_energy(case, session.board, program))
        if tools.logs:
            yield replace(case, worker_log=tuple(program.log()))
    except (errors.RunCrashed, errors.StageTimeout, errors.BoardUnfit):
        broken = True
        raise
    finally:
        session.unload_after_run(artifact, broken=broken)


def _make_sign_converter(
    own: Sequence[TensorSpec], signature: Signature | None
) -> Callable[[Mapping[str, Array]], Mapping[str, Array]]:
    """Return a function that converts integer outputs of undeclared signedness to the signedness in the signature."""
    signed = signature.outputs if signature is not None else ()

    def convert(outputs: Mapping[str, Array]) -> Mapping[str, Array]:
        if not len(outputs) == len(own) == len(signed):
            return outputs
        triples = zip(outputs.items(), own, signed, strict=True)
        return {name: read_as(array, spec.dtype, one) for (name, array), one, spec in triples}

    return convert


def _run_reference(case: Case, tools: Tools) -> Iterator[Case]:
    """Compute the references, or use the expected outputs.

    If a reference fails, hil uses the results of the other references.
    """
    if case.decoder is not None:
        from hil.controller.pipeline.decoding.generation import refer_generation

        yield from refer_generation(case, tools)
        return
    context, options = tools.context, case.options
    model, inputs = case.model, case.inputs
    assert model is not None and inputs is not None
    start = time.monotonic()
    tools.sink.stage(case, Stage.REFER, "")
    settings = make_reference_settings(options, context, case.folder / "logs" / "reference.log")
    answers = [read_expected(options.expected, model.outputs)] if options.expected else []
    unanswered: Mapping[str, errors.StageError] = {}
    runtime = get_runtime(case, tools.config)
    if options.references:
        try:
            more, unanswered = refer_each(options.references, model, inputs, runtime=runtime, **settings)
            answers += more
        except errors.StorageError:
            raise
        except (errors.StageError, errors.UsageError) as error:
            if not answers:
                raise
            unanswered = {", ".join(options.references): error.as_kind(errors.ReferenceFailed)}
    elif not answers:
        answer, unanswered = run_reference_with_fallback(model, inputs, runtime=runtime, **settings)
        answers.append(answer)
    makers = [case.artifact.compiler if case.artifact is not None else ""]
    makers += [str(answer.provenance.get("reference", "")) for answer in answers]
    if is_rewritten(model, makers):
        check_rewrites(model, inputs, **settings)
    yield (case := replace(case, references=tuple(answers), unanswered=unanswered))
    try:
        log = case.folder / "logs" / "plain-reference.log"
        case = replace(case, plain_reference=_run_plain_reference(inputs, options, context, log))
    except errors.StageError as error:
        case = replace(case, unanswered={**case.unanswered, PLAIN: error})
    yield (case := case.with_timings(refer_s=time.monotonic() - start))
    tools.sink.keep(case, "references")


def _compare_outputs(case: Case, tools: Tools) -> Iterator[Case]:
    """Compare the board's outputs with the references."""
    if case.decoder is None:
        return compare_case(case, tools)
    from hil.controller.pipeline.decoding.generation import compare_generation

    return compare_generation(case, tools)


def _run_plain_reference(
    inputs: Mapping[str, Array], options: Options, context: RunContext, log: Path
) -> RunResult | None:
    if options.plain_expected:
        return RunResult("expected outputs of the model before the recipe", options.plain_expected)
    if options.plain_model is None:
        return None
    model = import_model(options.plain_model, dims=options.dims, isolated=context.isolated, cache=context.cache)
    settings = make_reference_settings(options, context, log)
    if options.references:
        return refer_each(options.references, model, inputs, **settings)[0][0]
    return run_reference_with_fallback(model, inputs, **settings)[0]


def make_case_inputs(case: Case, specs: Sequence[TensorSpec]) -> Mapping[str, Array]:
    """Return a case's inputs for these specs. Inputs without a tensor from the user get seeded random values.

    Raises:
        UsageError: the user's inputs do not match the specs.
    """
    if case.make_inputs is not None:
        return case.make_inputs(specs)
    options = case.options
    ranges = case.model.ranges if case.model else {}
    return make_inputs(
        specs, options.inputs, seed=options.seed, ranges=ranges, user_range=options.input_range, dims=options.dims
    )


@dataclass(frozen=True)
class PipelineStep:
    """A stage of the pipeline."""

    stage: Stage
    run: Callable[[Case, Tools], Iterator[Case]]
    needed: Callable[[Case], bool]


def _has_program(case: Case) -> bool:
    return case.artifact is not None


# Stages of every case, in order.
PIPELINE = (
    PipelineStep(Stage.IMPORT, _import_model, lambda case: case.model is None),
    PipelineStep(Stage.COMPILE, _compile_program, lambda case: case.model is not None and case.artifact is None),
    PipelineStep(Stage.PUSH, _push_program, _has_program),
    PipelineStep(Stage.LOAD, _load_program, _has_program),
    PipelineStep(Stage.RUN, _run_program, _has_program),
    PipelineStep(
        Stage.REFER,
        _run_reference,
        lambda case: (
            not case.references
            and None not in (case.model, case.inputs)
            and not (case.needs_result and case.result is None)
        ),
    ),
    PipelineStep(Stage.COMPARE, _compare_outputs, lambda case: case.result is not None and bool(case.references)),
)
STAGES = tuple(step.stage for step in PIPELINE)

"""Implement generation in the stages: inputs of a prompt, the board's run, the reference, and the comparison."""

from __future__ import annotations

import itertools
import math
import mmap
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from hil import errors
from hil.compare.criteria import check_outputs, select_criteria
from hil.compare.generation.cache import match_cache
from hil.compare.generation.faults import find_stale
from hil.compare.generation.judge import judge_generation
from hil.compare.generation.results import CacheRows, FaultKind, Generated, GenerationVerdict
from hil.compare.verdict import Verdict, compare_output
from hil.controller.backends.references.generation import EXACT, run_generation
from hil.controller.devices.loaded_program import LoadedProgram
from hil.controller.models.generation.functions import add_prompt_functions
from hil.controller.models.generation.roles import CacheTensor, Decoder, detect_roles
from hil.controller.models.generation.spec import GenerateSpec, Prompt, Roles, find_prompt, read_spec
from hil.controller.models.importers import import_model
from hil.controller.models.inputs import make_inputs
from hil.controller.models.onnx_files.rewrite_check import check_rewrites, is_rewritten
from hil.controller.pipeline.case import Case, ReferenceDecoder
from hil.controller.pipeline.repeated import make_steps_arguments
from hil.controller.pipeline.settings.options import Options
from hil.controller.pipeline.tools import Tools, make_reference_settings
from hil.controller.pipeline.verdicts.accepting import load_rules
from hil.controller.pipeline.verdicts.in_arithmetic import get_arithmetic
from hil.controller.storage.run_context import RunContext
from hil.core.arithmetic import FLOAT32
from hil.core.files import open_file
from hil.core.results import Model, Outcome, RunResult, Stage
from hil.core.steps import (
    FORCED,
    INPUTS,
    LOGITS,
    OTHER_PROMPT,
    OUTPUTS,
    POSITIONS,
    PROMPT,
    TOKENS,
    TURN_END,
    StepsPlan,
    TokenPlaces,
    join_turns,
    make_rule_inputs,
    make_stepped_outputs,
    split_turns,
)
from hil.core.tensors import Array, TensorSpec, get_dtype_name, parse_dtype, shape_text

# Number of cache positions for checking a rewrite.
_PAST = 3
# Maximum number of outputs that a message names.
_SHOWN = 2
_FLOATS = "fV"  # NumPy's kinds of float dtypes; V is bfloat16


def begin_generation(case: Case, context: RunContext) -> Case:
    """Set the inputs of a case with ``--generate``: a prompt, forced tokens, and another prompt.

    Raises:
        UsageError: the specification is invalid, or does not match the model.
    """
    options, model = case.options, case.model
    assert model is not None and options.generate is not None
    if model.inputs is None or model.outputs is None:
        raise errors.UsageError(
            f"cannot generate tokens with a {model.format} file: its inputs are unknown",
            hint="use the model that the program was compiled from",
            option="--generate",
        )
    unused = {
        "--expected": bool(options.expected),
        "--reference": bool(options.references),
        "--rtol": options.rtol is not None,
        "--atol": options.atol is not None,
        "--allow-unstable": bool(options.allow_unstable),
        "--profile": options.profile,
    }
    for option in (name for name, given in unused.items() if given):
        raise errors.UsageError(
            f"--generate does not support {option}",
            hint="the bounds follow from the model in the board's arithmetic; add criteria with --accept",
            option=option,
        )
    spec = read_spec(options.generate)
    decoder = detect_roles(model.inputs, model.outputs, spec)
    decoder = add_prompt_functions(decoder, model, isolated=context.isolated, cache=context.cache)
    check_outputs(load_rules(options.accept), _list_logits(model, decoder))
    prompt = _choose_prompt(spec, options)
    _check_tokens(prompt, model.outputs[decoder.plan.logits])
    _check_bound(prompt, decoder.plan, "model")
    inputs = {**_make_prompt_inputs(prompt, decoder), **_make_constant_inputs(model, decoder, options)}
    reference = ReferenceDecoder(model, decoder)
    if spec.reference:
        path = options.generate.parent / spec.reference
        other = import_model(path, isolated=context.isolated, cache=context.cache)
        reference = _make_reference(other, spec, options, context)
        _check_bound(prompt, reference.decoder.plan, "reference")
    return replace(case, decoder=decoder, reference_decoder=reference, inputs=inputs, text_file=prompt.file)


def make_prompt_options(options: Options, prompt: str) -> Options:
    """Return the options for running a prompt, without references and tolerances.

    Some workloads apply references and tolerances to single calls instead of the whole generation.
    """
    return replace(options, prompt=prompt, references=(), rtol=None, atol=None, allow_unstable=())


def _choose_prompt(spec: GenerateSpec, options: Options) -> Prompt:
    """Return the case's prompt: the prompt with the name in the options, or the only prompt."""
    if not options.prompt and len(spec.prompt) == 1:
        return spec.prompt[0]
    if (found := find_prompt(spec, options.prompt)) is not None:
        return found
    names = ", ".join(one.name for one in spec.prompt)
    what = f"has no prompt {options.prompt!r}" if options.prompt else f"has {len(spec.prompt)} prompts"
    raise errors.UsageError(f"{options.generate} {what}", hint=f"set prompt to one of: {names}", option="--generate")


def _check_tokens(prompt: Prompt, logits: TensorSpec) -> None:
    """Raise UsageError for tokens outside the vocabulary, if the size of the vocabulary is known."""
    size = logits.shape[-1] if logits.shape else None
    tokens = [token for turn in prompt.turns for token in (*turn.tokens, *turn.forced)]
    if isinstance(size, int) and (large := [one for one in tokens if one >= size]):
        raise errors.UsageError(
            f"prompt {prompt.name!r} has token {large[0]}, but the model's vocabulary has only {size} tokens",
            hint="use the tokenizer of the model",
            option="--generate",
        )


def _check_bound(prompt: Prompt, plan: StepsPlan, owner: str) -> None:
    """Raise UsageError if the tokens of a prompt and the steps exceed a cache of fixed size."""
    total = sum(len(one.tokens) + one.count_steps(plan.steps) for one in prompt.turns)
    if 0 < plan.bound < total:
        raise errors.UsageError(
            f"prompt {prompt.name!r} with its steps needs {total} tokens, "
            f"but the {owner}'s cache has only {plan.bound}",
            hint="reduce steps, or shorten the prompt; if the cache has more positions, set bound in [roles]",
            option="--generate",
        )


def _make_reference(other: Model, spec: GenerateSpec, options: Options, context: RunContext) -> ReferenceDecoder:
    """Return the reference model with its roles.

    The roles use the names from the specification that exist in the model. hil detects the other roles.
    """
    symbols = {size for one in other.inputs or () for size in one.shape if isinstance(size, str)}
    if dims := {name: size for name, size in options.dims.items() if name in symbols}:
        other = import_model(other.path, dims=dims, isolated=context.isolated, cache=context.cache)
    names = {one.name for one in (*(other.inputs or ()), *(other.outputs or ()))}
    given = msgspec.structs.asdict(spec.roles)
    kept: dict[str, Any] = {role: name for role, name in given.items() if isinstance(name, str) and name in names}
    kept["cache"] = {own: new for own, new in spec.roles.cache.items() if {own, new} <= names}
    found, bound = _detect_reference(other, spec, kept), spec.roles.bound
    # The reference may store its cache in another form, or may have a larger cache.
    if 0 < found.plan.bound < bound and any(bound in shape[1:] for shape in found.plan.shapes):
        found = _detect_reference(other, spec, {**kept, "bound": bound})
    return ReferenceDecoder(other, found)


def _detect_reference(other: Model, spec: GenerateSpec, roles: Mapping[str, Any]) -> Decoder:
    return detect_roles(other.inputs or (), other.outputs or (), msgspec.structs.replace(spec, roles=Roles(**roles)))


def _list_logits(model: Model, decoder: Decoder) -> tuple[str, ...]:
    """Return the names for the logits in criteria."""
    return tuple(dict.fromkeys((LOGITS, (model.outputs or ())[decoder.plan.logits].name)))


def _make_prompt_inputs(prompt: Prompt, decoder: Decoder) -> dict[str, Array]:
    plan, tokens = decoder.plan, prompt.tokens
    other = [*reversed(tokens), tokens[0]][: plan.bound or None]
    if other == tokens:
        other = [tokens[0] + (1 if tokens[0] == 0 else -1)] * len(tokens)
    all_tokens, forced = prompt.join_turns(plan.steps)
    values = {PROMPT: all_tokens, FORCED: forced, OTHER_PROMPT: other}
    return {name: np.array(value, np.int64) for name, value in values.items()}


def _make_constant_inputs(model: Model, decoder: Decoder, options: Options) -> Mapping[str, Array]:
    specs = [spec for spec in model.inputs or () if spec.name in decoder.inputs]
    if taken := [spec.name for spec in specs if spec.name in INPUTS]:
        raise errors.UsageError(f"a constant input of a decoder cannot have the name {taken[0]!r}")
    if not specs and not options.inputs:
        return {}
    return make_inputs(
        specs,
        options.inputs,
        seed=options.seed,
        ranges=model.ranges,
        user_range=options.input_range,
        dims=options.dims,
    )


def check_generation(case: Case) -> None:
    """Raise ProtocolBroken unless the board returned logits and a token for every step."""
    decoder, result, inputs = case.decoder, case.result, case.inputs
    assert decoder is not None and result is not None and inputs is not None
    _check_outputs(case, result, inputs, decoder.plan)


def _check_outputs(case: Case, result: RunResult, inputs: Mapping[str, Array], plan: StepsPlan) -> None:
    """Raise ProtocolBroken unless the outputs are consistent with each other and with the model."""
    assert case.decoder is not None and case.model is not None
    outputs, turns = result.outputs, split_turns(inputs[PROMPT])
    forced = split_turns(inputs[FORCED]) if inputs[FORCED].size else None
    specs = {spec.name: spec for spec in make_stepped_outputs(case.model.outputs or (), plan)}
    for name in (*OUTPUTS, *(one.output for one in case.decoder.cache)):
        if name not in outputs or not _is_like(specs[name], outputs[name]):
            raise errors.ProtocolBroken(f"the board returned no valid output {specs[name]}")
    positions, picked = outputs[POSITIONS].tolist(), split_turns(outputs[TOKENS])
    vocabulary, tokens = outputs[LOGITS].shape[-1], [token for turn in picked for token in turn]
    steps = [plan.steps] * len(turns) if forced is None else [min(plan.steps, len(turn)) for turn in forced]
    is_whole = len(picked) == len(turns) and all(
        0 < len(turn) <= count + 1 and (len(turn) > count or (forced is None and turn[-1] in plan.stop))
        for turn, count in zip(picked, steps, strict=False)
    )
    places = TokenPlaces.from_turns(inputs[PROMPT], outputs[TOKENS])
    is_ordered = (
        is_whole
        and positions == sorted(set(positions))
        and {*places.chosen, *places.steps} <= {*positions}
        and positions[0] >= 0
        and positions[-1] == places.chosen[-1]
    )
    if not is_ordered or len(outputs[LOGITS]) != len(positions):
        raise errors.ProtocolBroken(
            "the board returned inconsistent outputs for a prompt of "
            f"{inputs[PROMPT].size} tokens and {sum(steps)} steps: "
            f"{len(outputs[LOGITS])} rows of logits, {len(positions)} positions and {len(tokens)} tokens"
        )
    if outside := [pair for pair in zip(places.chosen, tokens, strict=True) if not 0 <= pair[1] < vocabulary]:
        position, token = outside[0]
        raise errors.RunFailed(
            f"sampler, step {places.step_of(position)}: the board chose token {token}, "
            f"the vocabulary has {vocabulary} tokens",
            hint="check the argmax on the board",
        )


def _is_like(spec: TensorSpec, array: Array) -> bool:
    """Return True if an array matches a spec. A compiler may change the dtype of floats, so any float dtype matches."""
    are_floats = array.dtype.kind in _FLOATS and parse_dtype(spec.dtype).kind in _FLOATS
    return spec.accepts(spec.dtype if are_floats else get_dtype_name(array.dtype), array.shape)


def run_prefill(case: Case, program: LoadedProgram) -> Case:
    """Run all tokens of a generation as one prompt, to compare prompts with steps.

    hil skips this run if the model takes one token per call, or if the results depend on the other tokens in a call.
    """
    decoder, result, model = case.decoder, case.result, case.model
    assert decoder is not None and result is not None and model is not None and model.inputs is not None
    if decoder.plan.takes_single_tokens(model.inputs) or _is_scaled_dynamically(case):
        return case
    inputs = merge_prompt(force_all_tokens(case))
    plan = replace(decoder.plan, steps=0)
    arguments = {**make_steps_arguments(case), "steps": plan, "warmup": 0}
    try:
        prefill, _ = program.run(inputs, timeout=case.options.timeout, **arguments)
    except errors.StageError as error:
        where = f"the failed run used all {len(inputs[PROMPT])} tokens as the prompt"
        error.hint = "; ".join(filter(None, (error.hint, where)))
        raise
    _check_outputs(case, prefill, inputs, plan)
    return replace(case, prefill=prefill)


def _is_scaled_dynamically(case: Case) -> bool:
    """Return True if the model quantizes activations dynamically. The results of steps and prompts then differ."""
    reference = case.reference_decoder
    if reference is None or reference.model.format != "onnx":
        return False
    with open_file(reference.model.path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(b"DynamicQuantize") >= 0


def _get_fed_tokens(case: Case) -> Array:
    """Return the tokens of the steps: the forced tokens, or the tokens that the board chose."""
    assert case.inputs is not None
    forced = np.asarray(case.inputs[FORCED], np.int64)
    if forced.size or case.result is None:
        return forced
    return np.array(join_turns(turn[:-1] for turn in split_turns(case.result.outputs[TOKENS])), np.int64)


def _get_known_tokens(case: Case) -> Array:
    """Return the token of each position; -1 for tokens that the board chose."""
    inputs = force_all_tokens(case)
    tokens = merge_prompt(inputs)[PROMPT]
    if case.inputs is not None and case.result is not None and not case.inputs[FORCED].size:
        tokens[list(TokenPlaces.from_turns(inputs[PROMPT], case.result.outputs[TOKENS]).steps)] = -1
    return tokens


def merge_prompt(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return inputs without steps: the tokens of all turns and steps become one prompt."""
    turns, empty = split_turns(inputs[PROMPT]), np.empty(0, np.int64)
    pairs = itertools.zip_longest(turns, split_turns(inputs[FORCED]), fillvalue=())
    tokens = [token for pair in pairs for part in pair for token in part]
    return {**inputs, PROMPT: np.array(tokens, np.int64), FORCED: empty, OTHER_PROMPT: empty}


def force_all_tokens(case: Case) -> dict[str, Array]:
    """Return the inputs with the tokens of all steps as forced tokens. A reference then runs the same tokens."""
    return {**(case.inputs or {}), FORCED: _get_fed_tokens(case), OTHER_PROMPT: np.empty(0, np.int64)}


def refer_generation(case: Case, tools: Tools) -> Iterator[Case]:
    """Compute the reference of a generation."""
    start = time.monotonic()
    tools.sink.stage(case, Stage.REFER, "")
    reference = _run_on_host(case, tools, EXACT, "reference.log", force_all_tokens(case))
    model, artifact = case.model, case.artifact
    if model is not None and artifact is not None and is_rewritten(model, [artifact.compiler]):
        settings = make_reference_settings(case.options, tools.context, case.folder / "logs" / "reference.log")
        check_rewrites(model, _make_call(case), **settings)
    yield (case := replace(case, references=(reference,)).with_timings(refer_s=time.monotonic() - start))
    tools.sink.keep(case, "references")


def _make_call(case: Case) -> dict[str, Array]:
    """Return inputs for one call of the model, with random cache entries as if other calls came before."""
    model, decoder, inputs = case.model, case.decoder, case.inputs
    assert model is not None and model.inputs is not None and decoder is not None and inputs is not None
    plan, specs, prompt = decoder.plan, model.inputs, split_turns(inputs[PROMPT])[0]
    count = 1 if plan.takes_single_tokens(specs) else len(prompt)
    past = 0 if plan.bound else _PAST
    random = np.random.default_rng(0)
    call = {specs[place].name: made for place, made in make_rule_inputs(specs, plan, prompt[:count], past).items()}
    for (place, _), shape in zip(plan.feedback, plan.shapes, strict=True):
        values = random.standard_normal([size or past for size in shape])
        call[specs[place].name] = values.astype(parse_dtype(specs[place].dtype))
    return {**{name: inputs[name] for name in decoder.inputs}, **call}


def _run_control(case: Case, tools: Tools, arithmetic: str) -> tuple[RunResult, RunResult | None]:
    """Run the same tokens in an arithmetic.

    If the model returns the logits of all tokens, all tokens run as one prompt. A single prompt saves time, because an
    evaluation that rounds every value is a hundred times as slow as a runtime.

    Returns:
        The result in the arithmetic, and an exact result of the same calls. The exact result is None if the tokens did
        not run as one prompt.
    """
    inputs = force_all_tokens(case)
    whole = merge_prompt(inputs)
    if case.prefill is not None and len(case.prefill.outputs[LOGITS]) == len(whole[PROMPT]):
        baseline = _run_on_host(case, tools, EXACT, "control.log", whole)
        if len(baseline.outputs[LOGITS]) == len(whole[PROMPT]):
            return _run_on_host(case, tools, arithmetic, "control.log", whole), baseline
    return _run_on_host(case, tools, arithmetic, "control.log", inputs), None


def _run_on_host(case: Case, tools: Tools, arithmetic: str, log: str, inputs: Mapping[str, Array]) -> RunResult:
    """Run tokens on the host in an arithmetic."""
    reference = case.reference_decoder
    assert reference is not None
    plan = replace(reference.decoder.plan, steps=len(inputs[FORCED]), stop=())
    settings = make_reference_settings(case.options, tools.context, case.folder / "logs" / log)
    return run_generation(reference.model, inputs, plan, arithmetic, **settings)


def compare_generation(case: Case, tools: Tools) -> Iterator[Case]:
    """Compare a generation with its reference. The deviation of the hardware's arithmetic is permitted."""
    decoder, host, result, reference = case.decoder, case.reference_decoder, case.result, case.references[0]
    assert decoder is not None and host is not None and result is not None
    _check_reference(result, reference)
    start = time.monotonic()
    arithmetic = get_arithmetic(result) or FLOAT32
    tools.sink.stage(case, Stage.COMPARE, f"computing the model in {arithmetic}")
    inputs = force_all_tokens(case)
    control, baseline = _run_control(case, tools, arithmetic)
    # Without a baseline, the board's program or the reference returns only the last row of logits.
    prefill = None if case.prefill is None or baseline is None else case.prefill.outputs[LOGITS]
    board = replace(_make_generated(decoder, inputs, result.outputs, prefill), text=_get_known_tokens(case))
    exact, rounded = (_make_generated(host.decoder, inputs, one.outputs) for one in (reference, control))
    if host.decoder.cache != decoder.cache:
        board = replace(board, cache=match_cache(board.cache, exact.cache))
    calls = None if baseline is None else _make_generated(host.decoder, inputs, baseline.outputs)
    judged = judge_generation(board, exact, rounded, calls)
    verdict = _make_verdict(case, result, reference, judged)
    judged = replace(judged, outcome=verdict.outcome, reason=verdict.reason if not verdict else judged.reason)
    case = replace(case, generation=judged, verdicts=(verdict,), outcome=judged.outcome, reason=judged.reason)
    yield mark_unstable(case).with_timings(compare_s=time.monotonic() - start)


def mark_unstable(case: Case) -> Case:
    """Return a judged case. Its outcome is UNSTABLE if the board's runs of the same prompt differ."""
    decoder, result, judged = case.decoder, case.result, case.generation
    assert decoder is not None and result is not None and judged is not None
    fault, repetition = judged.fault, result.repetition
    is_finite = fault is None or fault.kind is not FaultKind.NONFINITE
    if repetition is None or repetition.is_stable or not is_finite:
        return case
    inputs = force_all_tokens(case)
    first = _make_generated(decoder, inputs, result.outputs)
    others = [one.outputs for one in repetition.answers[1:] if one.outputs is not None]
    if again := [one for one in others if _is_alike(one, result.outputs)]:
        fault = find_stale(first, _make_generated(decoder, inputs, again[0])) or fault
    where = f"{fault}" if fault is not None and fault.kind is FaultKind.STALE else "stale cache"
    what = ", ".join(repetition.differing[:_SHOWN]) + (", ..." if len(repetition.differing) > _SHOWN else "")
    reason = f"{where}: the prompt returned different {what or 'outputs'} when it ran after another prompt"
    reason += ", or the program is not deterministic"
    reason = "; ".join(filter(None, (reason, judged.reason)))
    judged = replace(judged, outcome=Outcome.UNSTABLE, reason=reason, fault=fault)
    return replace(case, generation=judged, outcome=judged.outcome, reason=judged.reason)


def _is_alike(outputs: Mapping[str, Array], first: Mapping[str, Array]) -> bool:
    """Return True if outputs have the names and ranks of the first run.

    Sizes may differ: a stale cache may be longer.
    """
    ranks = [{name: array.ndim for name, array in one.items()} for one in (outputs, first)]
    return ranks[0] == ranks[1] and len(outputs[LOGITS]) == len(outputs[POSITIONS])


def _check_reference(result: RunResult, reference: RunResult) -> None:
    """Raise ReferenceFailed unless the reference has logits for the board's positions and vocabulary."""
    logits, expected = result.outputs[LOGITS], reference.outputs[LOGITS]
    is_covered = set(result.outputs[POSITIONS].tolist()) <= set(reference.outputs[POSITIONS].tolist())
    if logits.shape[1:] != expected.shape[1:] or not is_covered:
        shapes = f"{shape_text(expected.shape)} logits of the reference, {shape_text(logits.shape)} of the board"
        raise errors.ReferenceFailed(
            f"the reference does not cover the board's positions and vocabulary: {shapes}",
            stage="compare",
            hint="export the reference with the logits of all tokens",
        )


def _make_generated(
    decoder: Decoder, inputs: Mapping[str, Array], outputs: Mapping[str, Array], prefill: Array | None = None
) -> Generated:
    places = TokenPlaces.from_turns(inputs[PROMPT], outputs[TOKENS])
    tokens = np.asarray(outputs[TOKENS])[np.asarray(outputs[TOKENS]) != TURN_END]
    count = len(merge_prompt(inputs)[PROMPT])
    cache = tuple(_cache_rows(one, outputs[one.output], count) for one in decoder.cache)
    return Generated(places, outputs[POSITIONS], outputs[LOGITS], tokens, cache, prefill)


def _cache_rows(tensor: CacheTensor, array: Array, count: int) -> CacheRows:
    """Return a cache tensor with one row per position. A recurrent state becomes a single row, at the last position."""
    if tensor.axis is None:
        return CacheRows(tensor.output, tensor.layer, tensor.is_key, np.reshape(array, (1, -1)), first=count - 1)
    moved = np.moveaxis(np.asarray(array), tensor.axis, 0)
    rows = moved.reshape(len(moved), math.prod(moved.shape[1:]))[:count]
    return CacheRows(tensor.output, tensor.layer, tensor.is_key, rows)


def _make_verdict(case: Case, result: RunResult, reference: RunResult, judged: GenerationVerdict) -> Verdict:
    """Return the verdict on the logits, with statistics and the user's criteria."""
    actual = result.outputs[LOGITS]
    place = {int(position): row for row, position in enumerate(reference.outputs[POSITIONS])}
    order = [place[int(position)] for position in result.outputs[POSITIONS]]
    expected = np.asarray(reference.outputs[LOGITS])[order].astype(actual.dtype)
    output = compare_output(LOGITS, actual, expected, rtol=0.0, atol=judged.error_bound, allow_blind=(LOGITS,))
    rules, decoder, model = load_rules(case.options.accept), case.decoder, case.model
    if rules:
        assert decoder is not None and model is not None
        name = next(one for one in _list_logits(model, decoder) if select_criteria(one, rules))
        output = replace(compare_output(name, actual, expected, accept=rules), name=LOGITS)
    unmet = output.reason if output.criteria and not output.passed else ""
    reason = "; ".join(filter(None, (judged.reason, unmet)))
    outcome = Outcome.FAIL if reason else Outcome.PASS
    output = replace(output, passed=not reason, reason=reason)
    return Verdict(outcome, reference.source, (output,), reason or "; ".join(judged.notes), reference.relation)

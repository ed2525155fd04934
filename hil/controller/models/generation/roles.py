"""Detect the roles of a decoder's inputs and outputs by their names and shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hil.controller.models.generation.spec import GenerateSpec
from hil.core.results import Model
from hil.core.steps import PromptFunction, StepRule, StepsPlan, find_fixed_axis
from hil.core.tensors import TensorSpec, parse_dtype
from hil.errors import UsageError, did_you_mean

# Rule -> names that exporters give to inputs with this rule (optimum, torch.onnx, onnxruntime-genai, LiteRT,
# ExecuTorch).
_NAMES: Mapping[StepRule, tuple[str, ...]] = {
    StepRule.TOKENS: ("input_ids", "tokens", "token_ids", "ids", "token", "decoder_input_ids"),
    StepRule.POSITIONS: ("position_ids", "positions", "cache_position", "input_pos", "position", "pos"),
    StepRule.MASK: ("attention_mask", "mask", "causal_mask", "attn_mask"),
    StepRule.LENGTH: ("total_sequence_length", "total_length"),
    StepRule.LAST: ("seqlens_k",),
}
_LOGITS = ("logits", "lm_logits", "prediction_scores")
# Parts of a cache input's name, and the parts that replace them in the output's name.
_PAST = ("past_key_values", "past_key_value", "past", "cache_in", "in")
_PRESENT = ("present", "present_key_values", "new_key_values", "new", "cache_out", "out", "updated")
# Names of the dimension that grows with each token.
_POSITIONS = re.compile(r"past|seq|len|total|cache_size|position")
_NUMBER = re.compile(r"\d+")
# Parts that exporters add to names: scopes and signatures at the start, output numbers at the end.
_ADDED = re.compile(r"^(.*/)?((serving_default|decode|prefill(_\d+)?)_)?|:\d+$")
# Part of a name that indicates keys: ``past_key_values.0.key``, ``kv_cache_k_0``; not the "key" in "key_values".
_KEY = re.compile(r"(?<![a-z])(keys?|k)(?![a-z])(?!_?values?)")
_ROLES_HINT = "set the roles in the specification: [roles] and [roles.cache], see docs/generation-export.md"


@dataclass(frozen=True)
class CacheTensor:
    """Tensor of the cache.

    Attributes:
        output: Name of the output with the new content.
        layer: Layer number, from 0.
        is_key: True if the tensor contains keys; False for values and unknown content.
        axis: Axis of positions, or None for a recurrent state.
    """

    output: str
    layer: int
    is_key: bool
    axis: int | None


@dataclass(frozen=True)
class Decoder:
    """Plan to run a model as a decoder, and the meaning of its cache tensors."""

    plan: StepsPlan
    cache: tuple[CacheTensor, ...]
    inputs: tuple[str, ...]  # names of the constant inputs


def detect_roles(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], spec: GenerateSpec) -> Decoder:
    """Detect how to generate tokens with a model.

    Raises:
        UsageError: A role cannot be detected, a name in the specification does not exist, or an output has another type
            than the input that takes its value.
    """
    roles = spec.roles
    made = {one.name: place for place, one in enumerate(outputs)}
    taken = {one.name: place for place, one in enumerate(inputs)}
    for name in (roles.tokens, roles.positions, roles.mask, roles.length, roles.last, *roles.cache):
        _check_name(name, taken, "input")
    for name in (roles.logits, *roles.cache.values()):
        _check_name(name, made, "output")
    cache = {**_pair_cache(inputs, outputs), **roles.cache}
    for own, other in cache.items():
        _check_feedback(inputs[taken[own]], outputs[made[other]])
    named = {rule: getattr(roles, rule.value) for rule in StepRule}
    free = [one for one in inputs if one.name not in cache and one.name not in named.values()]
    rules = []
    for rule in StepRule:
        found = named[rule] or _find_name(_NAMES[rule], free)
        if not found and rule in (StepRule.TOKENS, StepRule.POSITIONS):
            found = _find_unnamed(rule, free)
        if found:
            rules.append((taken[found], rule))
            free = [one for one in free if one.name != found]
    free_outputs = [one for one in outputs if one.name not in cache.values()]
    logits = roles.logits or _find_name(_LOGITS, free_outputs) or _find_only(free_outputs)
    if not any(rule is StepRule.TOKENS for _, rule in rules) or not logits:
        missing = "an output with logits" if not logits else "an input with token ids"
        raise UsageError(f"cannot find {missing} among {_list_names(inputs if logits else outputs)}", hint=_ROLES_HINT)
    pairs = sorted((taken[own], made[other]) for own, other in cache.items())
    mask = next((inputs[place] for place, rule in rules if rule is StepRule.MASK), None)
    specs = [inputs[place] for place, _ in pairs]
    known = roles.bound or _find_bound(specs, mask)
    axes = _find_axes(specs, known)
    bound = known or min((size for size in _list_sizes(specs, axes) if isinstance(size, int)), default=0)
    if roles.bound and axes and roles.bound not in _list_sizes(specs, axes) and not _is_growing(specs):
        raise UsageError(
            f"no cache input has {bound} positions (bound in [roles]): {_list_names(specs)}", option="--generate"
        )
    plan = StepsPlan(
        rules=tuple(rules),
        feedback=tuple(pairs),
        shapes=tuple(map(_make_empty_shape, specs, axes)),
        logits=made[logits],
        steps=spec.steps,
        chunk=spec.chunk,
        stop=tuple(spec.stop),
        bound=bound,
    )
    tensors = [
        _describe_cache(spec, outputs[output], axis) for spec, (_, output), axis in zip(specs, pairs, axes, strict=True)
    ]
    return Decoder(plan, _number_layers(tensors), tuple(one.name for one in free))


def match_prompt_function(decoder: Decoder, main: Model, other: Model) -> PromptFunction:
    """Match the inputs and outputs of a prompt function to those of the main function by name.

    Raises:
        UsageError: The function has other inputs, lacks tokens or cache tensors, or their types differ.
    """
    taken, made = (_match_names(*sides) for sides in ((main.inputs, other.inputs), (main.outputs, other.outputs)))
    own_inputs, own_outputs = other.inputs or (), other.outputs or ()
    inputs, outputs = main.inputs or (), main.outputs or ()
    if extra := set(range(len(own_inputs))) - set(taken):
        spec = own_inputs[min(extra)]
        raise UsageError(
            f"function {other.function!r} has an input {spec}, which {main.function!r} lacks: {_list_names(inputs)}",
            option="--generate",
        )
    needed = [(inputs, taken, decoder.plan.tokens)]
    for place, output in decoder.plan.feedback:
        needed += [(inputs, taken, place), (outputs, made, output)]
    for specs, places, place in needed:
        if places[place] < 0:
            listed = _list_names(own_inputs if specs is inputs else own_outputs)
            raise UsageError(f"function {other.function!r} lacks {specs[place]}: {listed}", option="--generate")
    for place, output in decoder.plan.feedback:
        _check_feedback(inputs[place], own_outputs[made[output]])
        _check_feedback(own_inputs[taken[place]], outputs[output])
    return PromptFunction(other.function, taken, made)


def _match_names(main: Sequence[TensorSpec] | None, other: Sequence[TensorSpec] | None) -> tuple[int, ...]:
    """For each tensor of ``main``, return the number of the tensor of ``other`` with the same name, or -1."""
    places = {_ADDED.sub("", one.name): place for place, one in enumerate(other or ())}
    return tuple(places.get(_ADDED.sub("", one.name), -1) for one in main or ())


def _check_name(name: str, known: Mapping[str, int], kind: str) -> None:
    if name and name not in known:
        raise UsageError(
            f"the model has no {kind} {name!r}",
            hint=f"{did_you_mean(name, known)}{kind}s: {', '.join(known)}",
            option="--generate",
        )


def _check_feedback(own: TensorSpec, other: TensorSpec) -> None:
    fixed = zip(own.shape, other.shape, strict=False)
    same = all(not (isinstance(a, int) and isinstance(b, int)) or a == b for a, b in fixed)
    if own.dtype != other.dtype or len(own.shape) != len(other.shape) or not same:
        raise UsageError(f"output {other} does not fit input {own}", hint=_ROLES_HINT, option="--generate")


def _pair_cache(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> dict[str, str]:
    """Return cache input -> output, by name."""
    made = {one.name for one in outputs}
    found: dict[str, str] = {}
    for one in inputs:
        if parse_dtype(one.dtype).kind in "biu" and len(one.shape) < 3:
            continue
        candidates = [one.name, f"{one.name}_out"]
        candidates += [one.name.replace(past, new, 1) for past in _PAST if past in one.name for new in _PRESENT]
        if other := next((name for name in candidates if name in made), ""):
            found[one.name] = other
    return found


def _find_name(names: Iterable[str], specs: Sequence[TensorSpec]) -> str:
    """Return the name of the first spec that matches one of the names.

    Exporters add prefixes and numbers: ``decode_tokens:0``.
    """
    plain = {_ADDED.sub("", one.name): one.name for one in specs}
    return next((plain[name] for name in names if name in plain), "")


def _find_unnamed(rule: StepRule, specs: Sequence[TensorSpec]) -> str:
    """Return the only integer input with the shape of tokens or of a position.

    This is necessary for ExecuTorch programs, which have no names.
    """
    known = {name for names in _NAMES.values() for name in names}
    integers = [one for one in specs if one.dtype in ("int32", "int64") and one.name not in known]
    if rule is StepRule.POSITIONS:
        return _find_only([one for one in integers if one.shape in ((), (1,))])
    rows = [one for one in integers if len(one.shape) == 2]
    return _find_only(rows or [one for one in integers if len(one.shape) == 1 and one.shape != (1,)])


def _find_only(specs: Sequence[TensorSpec]) -> str:
    return specs[0].name if len(specs) == 1 else ""


def _list_names(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(str(one) for one in specs[:8]) + (", ..." if len(specs) > 8 else "")


def _find_axes(cache: Sequence[TensorSpec], bound: int) -> list[int | None]:
    """Return the axis of positions of each tensor, or None for a recurrent state.

    The axis of positions has an unknown size. If multiple axes have an unknown size, an axis with a name for positions
    takes precedence. If all sizes are known, the axis of positions is an axis of size ``bound``, or the second axis
    from the end.
    """
    axes = list(map(_find_growing_axis, cache))
    grows = _is_growing(cache)
    return [
        _find_fixed_axis(spec, bound, grows=grows) if axis is None else axis
        for spec, axis in zip(cache, axes, strict=True)
    ]


def _is_growing(cache: Iterable[TensorSpec]) -> bool:
    return any(_find_growing_axis(spec) is not None for spec in cache)


def _find_growing_axis(spec: TensorSpec) -> int | None:
    unknown = [axis for axis, size in enumerate(spec.shape) if axis and not isinstance(size, int)]
    named = [axis for axis in unknown if _POSITIONS.search(str(spec.shape[axis]).lower())]
    return next(reversed(named or unknown), None)


def _find_fixed_axis(spec: TensorSpec, bound: int, *, grows: bool = False) -> int | None:
    """Return the axis of positions of a tensor with known sizes. Return None if other cache tensors grow."""
    return None if grows and not bound else find_fixed_axis(spec.name, spec.shape, bound)


def _list_sizes(cache: Sequence[TensorSpec], axes: Sequence[int | None]) -> list[int | str | None]:
    return [spec.shape[axis] for spec, axis in zip(cache, axes, strict=True) if axis is not None and spec.shape]


def _make_empty_shape(spec: TensorSpec, axis: int | None) -> tuple[int, ...]:
    """Return the shape of an empty cache tensor. Raises UsageError for an unknown size that the user must specify."""
    shape = []
    for place, size in enumerate(spec.shape):
        if isinstance(size, int):
            shape.append(size)
        elif place in (0, axis):
            shape.append(int(place != axis))  # a batch of 1
        else:
            raise UsageError(f"input {spec} has an unknown size {size}", hint=f"set the size: --dim {size}=N")
    return tuple(shape)


def _find_bound(cache: Sequence[TensorSpec], mask: TensorSpec | None) -> int:
    """Return the number of positions of a cache of fixed size: the last size of the mask.

    Return 0 if the cache does not match.
    """
    size = mask.shape[-1] if mask is not None and mask.shape else None
    fixed = [spec for spec in cache if _find_growing_axis(spec) is None]
    return size if isinstance(size, int) and any(_find_fixed_axis(spec, size) is not None for spec in fixed) else 0


def _describe_cache(own: TensorSpec, other: TensorSpec, axis: int | None) -> CacheTensor:
    name = _ADDED.sub("", own.name)
    numbers = _NUMBER.findall(name)
    is_key = bool(_KEY.search(name.lower()))
    return CacheTensor(other.name, int(numbers[-1]) if numbers else -1, is_key, axis)


def _number_layers(tensors: Sequence[CacheTensor]) -> tuple[CacheTensor, ...]:
    """Number the layers from 0.

    If each name has a different number, two consecutive tensors (keys, values) form a layer.
    """
    numbers = {one.layer for one in tensors}
    is_flat = len(numbers) == len(tensors) and len(tensors) % 2 == 0
    is_flat = is_flat and not any(one.is_key or one.axis is None for one in tensors)
    if -1 in numbers or is_flat:
        return tuple(
            replace(one, layer=place // 2, is_key=one.is_key or (is_flat and place % 2 == 0))
            for place, one in enumerate(tensors)
        )
    order = {number: place for place, number in enumerate(sorted(numbers))}
    return tuple(replace(one, layer=order[one.layer]) for one in tensors)

"""Make the inputs of single calls of a generation, with the cache that the reference computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hil.controller.backends.references.generation import EXACT, run_generation
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.decoding.generation import force_all_tokens, merge_prompt
from hil.controller.pipeline.tools import make_reference_settings
from hil.controller.storage.run_context import RunContext
from hil.core.steps import (
    PROMPT,
    TOKENS,
    TokenPlaces,
    make_empty_cache,
    make_rule_inputs,
)
from hil.core.tensors import Array, parse_dtype


@dataclass(frozen=True)
class DecoderCall:
    """Call of a decoder: position of its first token, and position after its last token. ``step`` is 0 in a prompt."""

    begin: int
    end: int
    step: int

    @property
    def name(self) -> str:
        """Name of the call: ``step-3`` for a step, or ``prompt-0`` with the first position in a prompt."""
        return f"step-{self.step}" if self.step else f"prompt-{self.begin}"


def list_calls(case: Case) -> Iterator[DecoderCall]:
    """Yield the calls of a case with --generate and a result, in order."""
    decoder, model = case.decoder, case.model
    assert decoder is not None and model is not None and model.inputs is not None
    assert case.inputs is not None and case.result is not None
    places = TokenPlaces.from_turns(case.inputs[PROMPT], case.result.outputs[TOKENS])
    size = 1 if decoder.plan.takes_single_tokens(model.inputs) else decoder.plan.chunk
    position, count = 0, places.chosen[-1] + 1
    while position < count:
        step = places.step_of(position)
        end = position + 1 if step else next((one for one in places.steps if one > position), count)
        end = min(end, position + size) if size else end
        yield DecoderCall(position, end, step)
        position = end


def make_call_inputs(case: Case, call: DecoderCall, context: RunContext, log: Path) -> dict[str, Array]:
    """Return the model's inputs for a call. The case must have a result.

    Raises:
        ReferenceFailed, StageTimeout: The reference cannot compute the cache.
    """
    decoder, model, reference = case.decoder, case.model, case.reference_decoder
    assert decoder is not None and reference is not None and model is not None and model.inputs is not None
    inputs = merge_prompt(force_all_tokens(case))
    tokens = inputs[PROMPT]
    made = make_rule_inputs(model.inputs, decoder.plan, tokens[call.begin : call.end].tolist(), call.begin)
    if call.begin:
        # Compute the cache with the reference model if it stores the cache in the same form, otherwise with the model
        # itself.
        is_alike = reference.decoder.cache == decoder.cache
        used = reference if is_alike else replace(reference, model=model, decoder=decoder)
        plan = replace(used.decoder.plan, steps=0, stop=())
        settings = make_reference_settings(case.options, context, log)
        before = {**inputs, PROMPT: tokens[: call.begin]}
        outputs = run_generation(used.model, before, plan, EXACT, **settings).outputs
        cache = [outputs[one.output] for one in used.decoder.cache]
    else:
        cache = list(make_empty_cache(model.inputs, decoder.plan).values())
    for (place, _), content in zip(decoder.plan.feedback, cache, strict=True):
        made[place] = content.astype(parse_dtype(model.inputs[place].dtype))
    constant = {name: np.asarray(inputs[name]) for name in decoder.inputs}
    named = {**{model.inputs[place].name: array for place, array in made.items()}, **constant}
    return {spec.name: named[spec.name] for spec in model.inputs}

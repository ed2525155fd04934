"""Find the first wrong call of a generation, so that its layers can be bisected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hil.controller.backends.references.generation import EXACT, run_generation
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.models.generation.spec import read_spec
from hil.controller.pipeline.board_pool import BoardPool
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.generation import with_all_tokens, with_one_prompt
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.options import Options
from hil.controller.pipeline.tools import reference_settings
from hil.controller.storage.runs import storing
from hil.core.steps import PROMPT, TOKENS, StepRule, TokenPlaces, make_empty_cache, make_rule_inputs
from hil.core.tensors import Array, dtype_of

_ALL_TOKENS = "prefill only"


def find_wrong_call(
    path: Path,
    options: Options,
    folder: Path,
    runner: Runner,
    pool: BoardPool,
    choice: BoardChoice,
    faults: Sequence[str],
) -> tuple[dict[str, Array], str]:
    """Run the prompts of ``options.generate`` until one fails.

    Returns:
        The inputs of the first wrong call, with the reference's cache, and a sentence that names the call. If no prompt
        fails, these are of the last call.

    Raises:
        UsageError: The specification does not fit the model.
        StageError, BoardError: A prompt ended in an error.
    """
    assert options.generate is not None
    with storing(folder):
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    for prompt in read_spec(options.generate).prompt:
        begun = runner.begin(path, replace(options, prompt=prompt.name), folder, name=prompt.name)
        (case,) = runner.run([begun], pool, choice, runtime=options.runtime, faults=faults)
        if case.error is not None:
            raise case.error
        if case.generation is not None and case.generation.fault is not None:
            break
    begin, end = _find_call(case)
    return _make_call_inputs(case, runner, begin, end), _describe_call(case, begin, end)


def _find_call(case: Case) -> tuple[int, int]:
    """Return the first position of the wrong call's tokens, and the one after the last."""
    judged, decoder = case.generation, case.decoder
    assert judged is not None and decoder is not None and case.inputs is not None and case.result is not None
    places = TokenPlaces.of_turns(case.inputs[PROMPT], case.result.outputs[TOKENS])
    count = places.chosen[-1] + 1
    position = judged.fault.position if judged.fault else count - 1
    if judged.fault is not None and judged.fault.phase == _ALL_TOKENS:
        return 0, count
    if places.step_of(position):
        return position, position + 1
    begin = max((step + 1 for step in places.steps if step < position), default=0)
    end = min((step for step in places.steps if step > position), default=count)
    size = 1 if _takes_one_token(case) else decoder.plan.chunk or end - begin
    begin += (position - begin) // size * size
    return begin, min(begin + size, end)


def _takes_one_token(case: Case) -> bool:
    assert case.decoder is not None and case.model is not None and case.model.inputs is not None
    place = next(place for place, rule in case.decoder.plan.rules if rule is StepRule.TOKENS)
    return case.model.inputs[place].shape[-1:] == (1,)


def _make_call_inputs(case: Case, runner: Runner, begin: int, end: int) -> dict[str, Array]:
    """Return the inputs of a call with the tokens from ``begin`` to ``end``."""
    decoder, model, reference = case.decoder, case.model, case.reference_decoder
    assert decoder is not None and reference is not None and model is not None and model.inputs is not None
    inputs = with_one_prompt(with_all_tokens(case))
    tokens = inputs[PROMPT]
    made = make_rule_inputs(model.inputs, decoder.plan, tokens[begin:end].tolist(), begin)
    if begin:
        # The reference is another model if it stores the cache in the same form.
        used = (
            reference if reference.decoder.cache == decoder.cache else replace(reference, model=model, decoder=decoder)
        )
        settings = reference_settings(case.options, runner.context, case.folder / "logs" / "call.log")
        plan = replace(used.decoder.plan, steps=0, stop=())
        outputs = run_generation(used.model, {**inputs, PROMPT: tokens[:begin]}, plan, EXACT, **settings).outputs
        cache = [outputs[one.output] for one in used.decoder.cache]
    else:
        cache = list(make_empty_cache(model.inputs, decoder.plan).values())
    for (place, _), content in zip(decoder.plan.feedback, cache, strict=True):
        made[place] = content.astype(dtype_of(model.inputs[place].dtype))
    constant = {name: np.asarray(inputs[name]) for name in decoder.inputs}
    return {**{model.inputs[place].name: array for place, array in made.items()}, **constant}


def _describe_call(case: Case, begin: int, end: int) -> str:
    judged, options = case.generation, case.options
    assert judged is not None
    where = f"position {begin}" if end == begin + 1 else f"positions {begin} to {end - 1}"
    if judged.fault is None:
        return f"all prompts passed; the bisected call is the last one of prompt {options.prompt}, {where}"
    return f"the bisected call is that of prompt {options.prompt}, {where}: {judged.reason}"

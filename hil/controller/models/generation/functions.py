"""Find the functions of a decoder for prompts."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from typing import Any

from hil.controller.models.generation.decode import DECODE
from hil.controller.models.generation.roles import Decoder, match_prompt_function
from hil.controller.models.importers import import_model
from hil.core.results import Model
from hil.errors import UsageError

# Function names in exported models, such as ``prefill_128``.
_PREFILL = re.compile(r"prefill(_\d+)?")


def add_prompt_functions(decoder: Decoder, model: Model, **work: Any) -> Decoder:
    """Add the prompt functions of the model's file whose inputs and outputs match the decoder.

    Return the new decoder.
    """
    if model.function != DECODE:
        return decoder
    names = [name for name in model.producer.get("functions", ()) if _PREFILL.fullmatch(name)]
    prompts = []
    for name in names:
        other = import_model(model.path, function=name, dims=model.dims, **work)
        # Skip functions that do not match, such as functions for images or for a different cache size.
        with contextlib.suppress(UsageError):
            prompts.append(match_prompt_function(decoder, model, other))
    return replace(decoder, plan=replace(decoder.plan, prompts=tuple(prompts)))

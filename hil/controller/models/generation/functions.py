"""Find the functions of a decoder: one for steps, and others for prompts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hil.controller.models.generation.roles import Decoder, match_prompt_function
from hil.controller.models.importers import import_model
from hil.core.results import Model
from hil.errors import UsageError

# Function names in exported models: the function for steps, and functions for prompts, such as ``prefill_128``.
_DECODE = "decode"
_PREFILL = re.compile(r"prefill(_\d+)?")


def import_decoder(path: Path, *, function: str = "", dims: Mapping[str, int] | None = None, **work: Any) -> Model:
    """Import the function for steps: the given function, the only function, or ``decode``.

    Errors: see :func:`import_model`.
    """
    try:
        return import_model(path, function=function, dims=dims, **work)
    except UsageError as error:
        if function or error.option != "--function":
            raise
        try:
            return import_model(path, function=_DECODE, dims=dims, **work)
        except UsageError:
            raise error from None


def choose_importer(generate: Path | None) -> Callable[..., Model]:
    """Return :func:`import_decoder` for a model with ``--generate``, and :func:`import_model` for others."""
    return import_model if generate is None else import_decoder


def add_prompt_functions(decoder: Decoder, model: Model, **work: Any) -> Decoder:
    """Add the prompt functions of the model's file whose inputs and outputs match the decoder.

    Return the new decoder.
    """
    if model.function != _DECODE:
        return decoder
    names = [name for name in model.producer.get("functions", ()) if _PREFILL.fullmatch(name)]
    prompts = []
    for name in names:
        other = import_model(model.path, function=name, dims=model.dims, **work)
        # Skip functions that do not match, such as functions for images or for a different cache size.
        with contextlib.suppress(UsageError):
            prompts.append(match_prompt_function(decoder, model, other))
    return replace(decoder, plan=replace(decoder.plan, prompts=tuple(prompts)))

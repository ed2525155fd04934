"""Import a model of a decoder: the function for steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hil.controller.models.importers import import_model
from hil.core.results import Model
from hil.errors import UsageError

# Name of the function for steps in exported models.
DECODE = "decode"


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
            return import_model(path, function=DECODE, dims=dims, **work)
        except UsageError:
            raise error from None


def choose_importer(generate: Path | None) -> Callable[..., Model]:
    """Return :func:`import_decoder` for a model with ``--generate``, and :func:`import_model` for others."""
    return import_model if generate is None else import_decoder

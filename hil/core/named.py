"""Code by its name, ``module:name``: what is imported where it is used, and not before."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def resolve(reference: str) -> Any:
    """Import what a ``module:name`` reference names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def later(reference: str) -> Callable[..., Any]:
    """The function that a reference names; it is imported when it is called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return resolve(reference)(*args, **kwargs)

    return call

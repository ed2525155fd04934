"""Resolve ``module:name`` references. Modules are imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def resolve(reference: str) -> Any:
    """Import the object that a ``module:name`` reference names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def defer_import(reference: str) -> Callable[..., Any]:
    """Return a function that imports the referenced function when called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return resolve(reference)(*args, **kwargs)

    return call

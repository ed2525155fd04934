"""Contexts of runs for tests without processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hil.controller.storage.cache import Cache
from hil.controller.storage.run_context import RunContext


def context_without_workers(folder: Path) -> RunContext:
    """Return a context with a cache in ``folder``. A step that needs an isolated process fails."""
    nothing: Any = None
    return RunContext(Cache(folder), nothing)

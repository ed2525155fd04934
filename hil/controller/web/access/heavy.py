"""Separate threads for pages that read large tensors, so that these pages do not delay other pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

T = TypeVar("T")
# Paths of these pages. Most of their requests wait for a computation (`tensors.view.RESULTS`).
HEAVY = ("/tensors", "/tensors.csv", "/tensors/map.svg", "/tensors/map.png", "/api/tensors/cell")
# Maximum concurrent requests for these pages, in total and of a client.
MAX_HEAVY, MAX_HEAVY_OF_CLIENT = 8, 6
_limiter = anyio.lowlevel.RunVar[anyio.CapacityLimiter]("hil_heavy_threads")


async def run_heavy(work: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread that other pages do not use."""
    limiter = _limiter.get(None)
    if limiter is None:
        limiter = anyio.CapacityLimiter(MAX_HEAVY)
        _limiter.set(limiter)
    return await anyio.to_thread.run_sync(work, *arguments, limiter=limiter)

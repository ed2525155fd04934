"""Wait for futures without missing Ctrl-C."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

# Maximum duration of one wait. If Ctrl-C arrives just before a wait without a timeout, Python handles it only after the
# wait.
_SLICE_SECONDS = 0.2


def iterate_completed(futures: Iterable[Future[T]]) -> Iterator[Future[T]]:
    """Yield futures as they end, like :func:`concurrent.futures.as_completed`. Ctrl-C interrupts the wait."""
    pending = set(futures)
    while pending:
        try:
            for future in concurrent.futures.as_completed(pending, _SLICE_SECONDS):
                pending.discard(future)
                yield future
        except concurrent.futures.TimeoutError:
            continue

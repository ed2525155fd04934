"""Cache for slow results, bounded by bytes. The least recently used result is evicted first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from hil.core.cancellation import hold_lock

T = TypeVar("T")


class _KeyLock:
    """Lock for the computation of one key, with the number of callers that wait."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.asking = 0


class Results:
    """Cache that computes each key only once, and limits concurrent computations.

    Args:
        most_bytes: maximum bytes to cache.
        at_once: maximum concurrent computations. Slow computations have a separate limit of the same size. Each
            ``make`` function must limit its own memory use.
    """

    def __init__(self, most_bytes: int, at_once: int) -> None:
        self._most = most_bytes
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._making: dict[Hashable, _KeyLock] = {}
        self._turns = {slow: threading.BoundedSemaphore(at_once) for slow in (False, True)}

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            return key in self._kept

    @property
    def bytes(self) -> int:
        """Bytes currently cached."""
        with self._lock:
            return self._bytes

    def get(self, key: Hashable, make: Callable[[], tuple[T, int]], *, slow: bool = False) -> T:
        """Return the cached result for a key, or compute it. Concurrent callers with the same key wait for the result.

        Args:
            make: returns the result and the size in bytes.
            slow: use the separate limit for slow computations, so that fast computations need not wait.
        """
        with self._lock:
            turn = self._making.setdefault(key, _KeyLock())
            turn.asking += 1
        try:
            with hold_lock(turn.lock):
                with self._lock:
                    if key in self._kept:
                        self._kept.move_to_end(key)
                        found: T = self._kept[key][0]
                        return found
                with hold_lock(self._turns[slow]):
                    made, size = make()
                self._store_result(key, made, size)
                return made
        finally:
            with self._lock:
                # Remove the lock only after the last caller, so that later callers share it and the result is computed
                # once.
                turn.asking -= 1
                if not turn.asking:
                    del self._making[key]

    def _store_result(self, key: Hashable, made: Any, size: int) -> None:
        with self._lock:
            self._kept[key] = (made, size)
            self._bytes += size
            while self._bytes > self._most:
                _, (_, freed) = self._kept.popitem(last=False)
                self._bytes -= freed

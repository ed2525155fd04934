"""Results that took a while, kept for whoever asks again: a bounded number of bytes, the oldest forgotten first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class _Turn:
    """Whoever has the lock makes a result; the others wait for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.asking = 0


class Results:
    """Made once for each key, by at most so many threads at a time.

    Args:
        most_bytes: how many bytes are kept.
        at_once: how many are made at the same time, and beside them as many of those that take long: what each takes in
            memory is its maker's to bound.
    """

    def __init__(self, most_bytes: int, at_once: int) -> None:
        self._most = most_bytes
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._making: dict[Hashable, _Turn] = {}
        self._turns = {slow: threading.BoundedSemaphore(at_once) for slow in (False, True)}

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            return key in self._kept

    @property
    def bytes(self) -> int:
        """How many are kept."""
        with self._lock:
            return self._bytes

    def get(self, key: Hashable, make: Callable[[], tuple[T, int]], *, slow: bool = False) -> T:
        """What is kept for a key, or what is made now; who asks meanwhile waits for it.

        Args:
            make: gives the result and how many bytes it takes.
            slow: it takes long; nothing that does not has to wait for it.
        """
        with self._lock:
            turn = self._making.setdefault(key, _Turn())
            turn.asking += 1
        try:
            with turn.lock:
                with self._lock:
                    if key in self._kept:
                        self._kept.move_to_end(key)
                        found: T = self._kept[key][0]
                        return found
                with self._turns[slow]:
                    made, size = make()
                self._keep(key, made, size)
                return made
        finally:
            with self._lock:
                # As long as somebody waits, who asks next waits with them: none makes what another makes.
                turn.asking -= 1
                if not turn.asking:
                    del self._making[key]

    def _keep(self, key: Hashable, made: Any, size: int) -> None:
        with self._lock:
            self._kept[key] = (made, size)
            self._bytes += size
            while self._bytes > self._most:
                _, (_, freed) = self._kept.popitem(last=False)
                self._bytes -= freed

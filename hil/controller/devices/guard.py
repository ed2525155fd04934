"""The time limit of a call that gRPC has no deadline for: one that has to go on, however long it takes as a whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_TICK_S = 0.25


class Guard:
    """Ends a call when what is expected of its other side does not come in time.

    Seconds are counted as this process sees them pass: one that was itself stopped for a while blames nobody.
    ``cancel`` is called at most once, in a thread of its own.
    """

    def __init__(self, cancel: Callable[[], object]) -> None:
        self._cancel = cancel
        self.expired = False  # whether the time ran out
        self._left = self._limit_s = float("inf")
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="hil-guard").start()

    def within(self, seconds: float) -> None:
        """From now on, something is expected within so many seconds; nothing, where they are infinite."""
        with self._lock:
            self._left = self._limit_s = seconds

    def heard(self) -> None:
        """Something was heard: what is expected may take its whole time again."""
        with self._lock:
            self._left = self._limit_s

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(_TICK_S):
            now = time.monotonic()
            with self._lock:
                self._left -= min(now - before, 2 * _TICK_S)
                self.expired = self._left <= 0
            before = now
            if self.expired:
                self._cancel()
                return

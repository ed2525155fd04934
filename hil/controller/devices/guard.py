"""The time limit of a call that gRPC has no deadline for: one that has to go on, however long it takes as a whole."""

from __future__ import annotations

import os
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
        _WATCH.add(self)

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
        self.within(float("inf"))
        _WATCH.remove(self)
        self._cancel = _nothing  # which may hold on to whoever has this guard

    def pass_time(self, seconds: float) -> None:
        """Count seconds that have passed."""
        with self._lock:
            self._left -= seconds
            self.expired = self._left <= 0
        if self.expired:
            threading.Thread(target=self._cancel, daemon=True, name="hil-guard").start()
            self.close()


def _nothing() -> None:
    """What a guard that watches no more has to end."""


class _Watch:
    """Has all guards of this process count, in one thread: a call begins and ends faster than a thread."""

    def __init__(self) -> None:
        self.start_anew()

    def start_anew(self) -> None:
        """Watch nothing: a forked process has none of its parent's threads, and its calls are not its to end."""
        self._guards: set[Guard] = set()
        self._lock = threading.Lock()
        self._some = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, guard: Guard) -> None:
        with self._lock:
            self._guards.add(guard)
            self._some.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._count, daemon=True, name="hil-guards")
                self._thread.start()

    def remove(self, guard: Guard) -> None:
        with self._lock:
            self._guards.discard(guard)

    def _count(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(_TICK_S)
            now = time.monotonic()
            with self._lock:
                guards = list(self._guards)
                if not guards:
                    self._some.clear()
            for guard in guards:
                guard.pass_time(min(now - before, 2 * _TICK_S))
            before = now
            if not guards:
                self._some.wait()
                before = time.monotonic()


_WATCH = _Watch()
os.register_at_fork(after_in_child=_WATCH.start_anew)

"""Progress timeout for calls without a gRPC deadline.

The total time of such a call is not limited, but the call must make progress.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

_TICK_SECONDS = 0.25


class Guard:
    """Cancel a call if the expected progress does not occur in time.

    Only the time in which this process runs counts, so a suspension of the process does not cause timeouts. ``cancel``
    is called at most once, in a separate thread.
    """

    def __init__(self, cancel: Callable[[], object]) -> None:
        self._cancel = cancel
        self.expired = False  # whether the timeout occurred
        self._left = self._limit_s = float("inf")
        self._lock = threading.Lock()
        _WATCH.add(self)

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout for the next progress, starting now. Infinity disables it."""
        with self._lock:
            self._left = self._limit_s = seconds

    def restart_timeout(self) -> None:
        """Restart the current timeout after progress."""
        with self._lock:
            self._left = self._limit_s

    def close(self) -> None:
        """Stop watching."""
        self.set_timeout(float("inf"))
        _WATCH.remove(self)
        self._cancel = _do_nothing  # drop the reference to the callback, which may refer to the owner of this guard

    def pass_time(self, seconds: float) -> None:
        """Subtract elapsed seconds from the timeout."""
        with self._lock:
            self._left -= seconds
            self.expired = self._left <= 0
        if self.expired:
            # If no thread can be started, the next tick retries. This thread must not fail, because it serves all
            # guards.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._cancel, daemon=True, name="hil-guard").start()
                self.close()


def _do_nothing() -> None:
    """Do nothing: the callback of a closed guard."""


class _Watch:
    """Count time for all guards of this process in one thread. A thread per call would be slower than the calls."""

    def __init__(self) -> None:
        self.drop_guards()

    def drop_guards(self) -> None:
        """Drop all guards. A forked process does not have the parent's threads, and must not end the parent's calls."""
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
            time.sleep(_TICK_SECONDS)
            now = time.monotonic()
            with self._lock:
                guards = list(self._guards)
                if not guards:
                    self._some.clear()
            for guard in guards:
                guard.pass_time(min(now - before, 2 * _TICK_SECONDS))
            before = now
            if not guards:
                self._some.wait()
                before = time.monotonic()


_WATCH = _Watch()
os.register_at_fork(after_in_child=_WATCH.drop_guards)

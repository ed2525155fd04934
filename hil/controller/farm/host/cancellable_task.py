"""Tasks of a worker's main thread that other threads can cancel."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class CancellableTask:
    """Runs cancellable tasks in sequence. Create this object, and run the tasks, in the main thread.

    If a cancelled task has not ended after ``patience_s`` seconds, a timer thread calls ``give_up``.
    """

    def __init__(self, patience_s: float, give_up: Callable[[], None]) -> None:
        self._patience_s, self._give_up = patience_s, give_up
        self._lock = threading.Lock()
        self._key: int | None = None
        self._last: int | None = None
        # Key of the cancelled task and the reason. The key prevents a late cancellation from ending a newer task.
        self._ended: tuple[int | None, str] = (None, "")
        self._raised = False
        signal.signal(signal.SIGUSR1, lambda *_: self.raise_if_ended())

    @property
    def why(self) -> str:
        """Reason for the cancellation of the current or last task; "" if the task was not cancelled."""
        key, why = self._ended
        return why if key == self._last else ""

    def run(self, key: int, work: Callable[[], T]) -> T | None:
        """Run a task, identified by a key. Returns None if the task was cancelled (see :attr:`why`)."""
        self._last, self._raised = key, False
        try:
            try:
                self._key = key
                return work()
            finally:
                self._key = None
        except KeyboardInterrupt:
            self._key = None
            if not self.why:
                raise  # Ctrl-C by a user
            return None

    def end(self, key: int, why: str) -> None:
        """Cancel the task with this key, if the task runs. Do not call this method from the main thread."""
        with self._lock:
            if self._key != key or self.why:
                return
            self._ended = (key, why)
        watch = threading.Timer(self._patience_s, self._give_up_if_running, [key])
        watch.daemon = True
        watch.start()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def end_here(self, why: str) -> None:
        """Cancel the running task, if any. Call this method from a signal handler."""
        if self._key is not None:
            self._ended = (self._key, self.why or why)
            self.raise_if_ended()

    def raise_if_ended(self) -> None:
        """Raise KeyboardInterrupt once in a cancelled task. Call this method from a signal handler."""
        if self._key is not None and self.why and not self._raised:
            self._raised = True
            raise KeyboardInterrupt

    def _give_up_if_running(self, key: int) -> None:
        if self._key == key:
            self._give_up()

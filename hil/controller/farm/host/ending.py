"""Work of the main thread that other threads can end, as Ctrl-C would: the library takes that well, wherever it is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Endable:
    """Runs one piece of work after another. To be made, and run, in the main thread.

    Args:
        patience_s: work that is to end and goes on for so long ...
        give_up: ... is none that can be ended: this is called then, by another thread.
    """

    def __init__(self, patience_s: float, give_up: Callable[[], None]) -> None:
        self._patience_s, self._give_up = patience_s, give_up
        self._lock = threading.Lock()
        self._key: int | None = None
        self._last: int | None = None
        # Which work is to end, and why: a thread that is slow to say so can mean no later one.
        self._ended: tuple[int | None, str] = (None, "")
        self._raised = False
        signal.signal(signal.SIGUSR1, lambda *_: self.raise_if_ended())

    @property
    def why(self) -> str:
        """For what reason the work that runs, or ran last, was ended; "" where it comes to its own end."""
        key, why = self._ended
        return why if key == self._last else ""

    def run(self, key: int, work: Callable[[], T]) -> T | None:
        """Do some work.

        Args:
            key: tells it from any other one, before and after.
            work: it.

        Returns:
            What the work did; None where it was ended, and :attr:`why` says for what reason.
        """
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
                raise  # a person's Ctrl-C
            return None

    def end(self, key: int, why: str) -> None:
        """End some work, if it runs. By any thread but the main one."""
        with self._lock:
            if self._key != key or self.why:
                return
            self._ended = (key, why)
        watch = threading.Timer(self._patience_s, self._look, [key])
        watch.daemon = True
        watch.start()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def end_here(self, why: str) -> None:
        """End the work that runs, if any. By a signal's handler."""
        if self._key is not None:
            self._ended = (self._key, self.why or why)
            self.raise_if_ended()

    def raise_if_ended(self) -> None:
        """In a signal's handler: leave the work that is to end, once."""
        if self._key is not None and self.why and not self._raised:
            self._raised = True
            raise KeyboardInterrupt

    def _look(self, key: int) -> None:
        if self._key == key:
            self._give_up()

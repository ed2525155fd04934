"""Cancel work in threads. Long loops call :func:`check_cancelled`, which raises WorkCancelled after a cancellation.

The cancellation flag belongs to the context (:mod:`contextvars`), which hil copies into worker threads. Work in other
contexts is never cancelled.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol

# Polling interval for the flag while waiting for a lock or process.
LOOK_SECONDS = 0.1
_flag: ContextVar[threading.Event | None] = ContextVar("hil_cancelled", default=None)


class WorkCancelled(BaseException):
    """Raised in cancelled work. Not an Exception, so that error handlers do not suppress it."""


class _Lock(Protocol):
    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool: ...

    def release(self) -> None: ...


@contextlib.contextmanager
def cancel_on(flag: threading.Event) -> Iterator[None]:
    """Cancel this context's work when the flag is set."""
    token = _flag.set(flag)
    try:
        yield
    finally:
        _flag.reset(token)


def is_cancelled() -> bool:
    """Return True if this context's work was cancelled."""
    flag = _flag.get()
    return flag is not None and flag.is_set()


def check_cancelled() -> None:
    """Raise WorkCancelled if this context's work was cancelled."""
    if is_cancelled():
        raise WorkCancelled


@contextlib.contextmanager
def hold_lock(lock: _Lock) -> Iterator[None]:
    """Hold a lock or semaphore. Raises WorkCancelled if the work is cancelled during the wait."""
    while not lock.acquire(timeout=LOOK_SECONDS):
        check_cancelled()
    try:
        yield
    finally:
        lock.release()

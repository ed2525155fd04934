"""A limit of CPU time for an isolated function: other load on the machine does not change what it allows."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from hil.errors import ReferenceTooSlow


class _TimeIsUp(BaseException):
    """Passes through ``except Exception`` of what is interrupted."""


@contextlib.contextmanager
def limited_cpu(seconds: float | None) -> Iterator[None]:
    """End the block once this process has used so much CPU time; a single call of native code is not interrupted.

    Without timers of CPU time (Windows, threads other than the main one) there is no limit.

    Raises:
        ReferenceTooSlow: the limit was reached.
    """
    if seconds is None or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    is_over = False

    def stop(number: int, frame: FrameType | None) -> None:
        if not is_over:
            raise _TimeIsUp

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
        is_over = True
    except _TimeIsUp:
        raise ReferenceTooSlow(
            f"it needs more than {seconds:g} s of CPU time", hint="ask for it by name: then it takes the time it needs"
        ) from None
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)

"""Limit the CPU time of an isolated function.

Unlike a timeout, the limit does not depend on the load of the machine.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from hil.errors import ReferenceTooSlow


class _TimeIsUp(BaseException):
    """A BaseException, so that ``except Exception`` in the interrupted code does not catch it."""


@contextlib.contextmanager
def limit_cpu(seconds: float | None) -> Iterator[None]:
    """Interrupt the ``with`` block after this much CPU time of the process. Calls of native code are not interrupted.

    The limit needs a CPU time timer: it has no effect on Windows or outside the main thread.

    Raises:
        ReferenceTooSlow: the block exceeded the limit.
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
            f"the reference requires more than {seconds:g} s of CPU time",
            hint="select the reference with --reference NAME to remove the limit",
        ) from None
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)

"""Simulate Ctrl-C at a chosen step of a call."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from hil.controller.devices.agent_client import interruptible_channel


def _ends(frame: FrameType | None) -> bool:
    """Return whether an object is being finalized. Python drops exceptions in finalizers."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def interrupted_at(number: int, function: Callable[[], None]) -> tuple[bool, bool]:
    """Call a function, and raise KeyboardInterrupt at a line of the code that it calls.

    Return whether it was raised.
    """
    steps = 0
    passed_over = (interruptible_channel.__file__, function.__code__.co_filename)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal steps
        if event == "line" and frame.f_code.co_filename not in passed_over and not _ends(frame):
            steps += 1
            if steps == number:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    # Python drops an exception in a finalizer, such as a finalizer of an object of another test.
    gc.collect()
    gc.disable()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True, True
    finally:
        sys.settrace(None)
        gc.enable()
    return steps >= number, False

"""Wait for what comes about in its own time."""

from __future__ import annotations

import inspect
import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(
    condition: Callable[[], T],
    what: str | Callable[[], str] = "",
    *,
    within_s: float = 60.0,
    every_s: float = 0.02,
    process: subprocess.Popen | None = None,
) -> T:
    """Call the condition until what it returns is true, and return that.

    Args:
        condition: asked every ``every_s`` seconds.
        what: what the failure says did not come about; the condition's source if empty.
        process: waiting ends with a failure when this process has ended.

    Raises:
        AssertionError: ``within_s`` seconds have passed, or the process has ended.
    """
    deadline = time.monotonic() + within_s
    while True:
        # What a process does last, it does before it is known to have ended.
        ended = process is not None and process.poll() is not None
        if answer := condition():
            return answer
        if ended or time.monotonic() > deadline:
            how = f"the process ended with {process.returncode}" if ended and process else f"after {within_s:g} s"
            told = what() if callable(what) else what or _source(condition)
            raise AssertionError(f"{how}, still not: {told}; the last answer was {answer!r}")
        time.sleep(every_s)


def _source(condition: Callable[[], object]) -> str:
    try:
        return inspect.getsource(condition).strip()
    except (OSError, TypeError):
        return repr(condition)

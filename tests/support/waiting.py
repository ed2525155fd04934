"""Wait for conditions with a timeout."""

from __future__ import annotations

import inspect
import os
import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(
    condition: Callable[[], T],
    note: str | Callable[[], str] = "",
    within_s: float = 90.0,
    *,
    every_s: float = 0.02,
    process: subprocess.Popen | None = None,
) -> T:
    """Call a condition until its result is true. Return this result.

    Args:
        condition: called every ``every_s`` seconds. The message of a failure shows its source and its last result.
        note: additional text for this message.
        process: the wait fails at once when this process has ended.

    Raises:
        AssertionError: ``within_s`` seconds have passed, or the process has ended.
    """
    deadline = time.monotonic() + within_s
    while True:
        # Check this first, because the last effects of a process can appear just before its end.
        ended = process is not None and process.poll() is not None
        if answer := condition():
            return answer
        if ended or time.monotonic() > deadline:
            how = f"the process ended with {process.returncode}" if process and ended else f"after {within_s:g} s"
            notes = [note() if callable(note) else note, f"the last answer was {answer!r}"]
            raise AssertionError("; ".join([f"{how}, still not: {_source(condition)}", *filter(None, notes)]))
        time.sleep(every_s)


def load_per_core() -> float:
    """Return the number of processes that share a core now; at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def allowed_s(seconds: float) -> float:
    """Return a timeout for an action that takes less than ``seconds`` on an idle machine. It is longer on a busy
    machine.
    """
    return seconds * load_per_core()


def _source(condition: Callable[[], object]) -> str:
    try:
        return inspect.getsource(condition).strip()
    except (OSError, TypeError):
        return repr(condition)

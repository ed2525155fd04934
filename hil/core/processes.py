"""Processes of ours: the command that starts one, how they are ended, and how it is told how they ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

# For Python 3.10, which has no -P, and imports what runs a module with the working directory on the path already.
_START = (
    "import sys; sys.path.remove(''); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *words: str) -> list[str]:
    """``python -m MODULE WORDS``, which takes no module from the folder that it is called in.

    Args:
        module: of an installed package.
        words: its arguments.
    """
    start = ["-P", "-m"] if sys.version_info >= (3, 11) else ["-c", _START]
    return [sys.executable, *start, module, *words]


def signal_name(number: int) -> str:
    """A signal's name: 11 is SIGSEGV; ``signal N`` where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_text(code: int) -> str:
    """What an exit code, negative for a signal, says to people: ``was killed by SIGSEGV``."""
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def signal_group(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process group; one that is gone, or is another's by now, is left alone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def wait_or_kill(process: subprocess.Popen[Any], seconds: float, *, group: bool = False) -> int:
    """Wait for a process that was told to end; returns its exit code.

    Args:
        process: the process.
        seconds: after which it is killed.
        group: whether its whole group is killed.
    """
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        if group:
            signal_group(process.pid)
        else:
            process.kill()
        return process.wait()

"""What the end of a command means: which of hil's errors a failed one is."""

from __future__ import annotations

import posixpath
import re
import signal

from hil.controller.devices.agentless.scripts import Ended
from hil.controller.storage.isolated import signal_name
from hil.errors import HilError, LoadFailed, RunCrashed, RunFailed

_CANNOT_START = (126, 127)
# A shell adds the signal's number to 128; a program that ends with -1 has the code 255, and crashed of nothing.
_SIGNALS = range(129, 129 + 64)
_DETAIL = 4000
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# iree-run-module and its forks say this once the program is loaded and its inputs are read.
_BEGUN = re.compile(r"^EXEC @", re.M)
_OF_IREE = re.compile(r"^(?:\S+\.\w+|<vm>):\d+: ([A-Z_]+); ", re.M)


def failure(ended: Ended, err: str, program: str, *, loads: bool = False) -> HilError:
    """The error that a command's end with another code than 0 stands for.

    Args:
        ended: how it ended.
        err: what it wrote to stderr.
        program: the command's program, for messages.
        loads: the board is known to load what it runs: the run failed.
    """
    said = _COLOUR.sub("", err).strip()
    detail = said[-_DETAIL:]
    name = posixpath.basename(program)
    if ended.code in _CANNOT_START and not _OF_IREE.search(said):
        return LoadFailed(
            f"the board cannot start the command {name}: {_first_line(said) or f'exit code {ended.code}'}",
            stage="load",
            hint="the program, or a library that it needs (glibc, libstdc++), is missing there or is of another CPU",
            detail=detail,
        )
    if ended.code in _SIGNALS:
        return _crash(ended.code - 128, name, detail)
    if _OF_IREE.search(said) and not loads and not _BEGUN.search(ended.out):
        return LoadFailed(
            f"IREE refused the program: {_first_line(said)}", stage="load", hint=_hint(said), detail=detail
        )
    return RunFailed(f"{name} failed with exit code {ended.code}: {_first_line(said)}".rstrip(": "), detail=detail)


def _crash(number: int, name: str, detail: str) -> HilError:
    hint = ""
    if number == signal.SIGKILL:
        hint = "hil did not send it: the board may have run out of memory"
    elif number == signal.SIGILL:
        hint = "the program uses instructions this CPU lacks: check the compile target"
    return RunCrashed(f"{name} was killed by {signal_name(number)} during run", hint=hint, detail=detail)


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    best = next((line for line in lines if _OF_IREE.match(line)), lines[0] if lines else "")
    return best[:400]


def _hint(said: str) -> str:
    if "INCOMPATIBLE" in said or "no executable" in said:
        return "the program was compiled for another CPU or device: check the board's compile flags"
    if "no driver" in said:
        return "name a device that the command has: [devices] in the board's config"
    return ""

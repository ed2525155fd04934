"""Run a program in a separate terminal, with a simulated user who reads the output and types."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

CTRL_C = b"\x03"
CTRL_D = b"\x04"


class Terminal:
    """Output of a program, and a keyboard."""

    def __init__(self, child: int, terminal: int) -> None:
        self._child = child
        self._terminal = terminal
        self._code: int | None = None
        self._seen = 0
        self.shown = b""

    def wait_for(self, words: bytes, seconds: float = 60.0) -> None:
        """Read until the program prints a text after the texts of earlier calls."""
        until = time.monotonic() + seconds
        while (found := self.shown.find(words, self._seen)) < 0:
            assert time.monotonic() < until and self._read(), f"{words!r} was not shown: {self.shown!r}"
        self._seen = found + len(words)

    def type(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def receive_answer(self, prompt: bytes, keys: bytes) -> None:
        """Wait for a question, then type a line."""
        self.wait_for(prompt)
        self.type(keys + b"\n")

    def rest(self, seconds: float) -> bytes:
        """Return the output of the next seconds."""
        start, until = len(self.shown), time.monotonic() + seconds
        while time.monotonic() < until and self._read(until - time.monotonic()):
            pass
        return self.shown[start:]

    def ended(self, seconds: float = 60.0) -> int:
        """Wait for the end of the program. Return its exit code."""
        until = time.monotonic() + seconds
        while self._read(until - time.monotonic()):
            pass
        assert time.monotonic() < until, f"it did not end: {self.shown!r}"
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
        return self._code

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._code is None:
                os.kill(self._child, signal.SIGKILL)
                os.waitpid(self._child, 0)
        os.close(self._terminal)

    def _read(self, seconds: float = 60.0) -> bool:
        """Read the next output. Return whether the program printed anything before its end."""
        if select.select([self._terminal], [], [], max(seconds, 0))[0]:
            with contextlib.suppress(OSError):  # A terminal returns this error after its last process has ended.
                piece = os.read(self._terminal, 4096)
                self.shown += piece
                return bool(piece)
        return False


@contextlib.contextmanager
def terminal(*argv: object, cwd: Path, env: Mapping[str, str]) -> Iterator[Terminal]:
    """Run a Python program in a terminal, for example `-m hil.controller.cli.main ...`."""
    child, end = pty.fork()
    if child == 0:
        os.chdir(cwd)
        os.execve(sys.executable, [sys.executable, *map(str, argv)], {**env, "TERM": "xterm", "COLUMNS": "150"})
    there = Terminal(child, end)
    try:
        yield there
    finally:
        there.close()

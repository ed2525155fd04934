"""Run a command of a config, and keep only a limited part of the output: a command may print without end."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hil.core.processes import signal_group, wait_or_kill

# Bytes of the first and of the last part of an output.
PART_BYTES = 256 << 10
_CHUNK_BYTES = 64 << 10
# Largest size of a pipe without privileges.
_MAX_PIPE_BYTES = 1 << 20
_POLL_SECONDS, _CLOSED_SECONDS = 0.1, 0.01
_END_SECONDS = 1.0


@dataclass(frozen=True)
class CommandOutput:
    """Exit code of a command, negative for a signal, and output (stdout and stderr)."""

    code: int
    text: str


class OutputParts:
    """First and last part of an output."""

    def __init__(self, part_bytes: int = PART_BYTES) -> None:
        self._part_bytes = part_bytes
        self._first = b""
        self._last: deque[bytes] = deque()
        self._last_bytes = self._omitted = 0

    def add(self, data: bytes) -> None:
        """Add bytes."""
        room = self._part_bytes - len(self._first)
        self._first += data[:room]
        if rest := data[room:]:
            self._last.append(rest)
            self._last_bytes += len(rest)
        while self._last and self._last_bytes - len(self._last[0]) >= self._part_bytes:
            dropped = len(self._last.popleft())
            self._last_bytes -= dropped
            self._omitted += dropped

    def join(self) -> str:
        """Return the parts as text, with a note about the omitted bytes between them."""
        last = b"".join(self._last)
        extra = max(len(last) - self._part_bytes, 0)
        omitted = self._omitted + extra
        note = f"\n[{omitted} bytes omitted]\n".encode() if omitted else b""
        return (self._first + note + last[extra:]).decode(errors="replace").replace("\r\n", "\n")


def run_bounded(argv: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> CommandOutput:
    """Run a command without input, in a new process group, and wait for the end.

    Background processes of the command may keep the output open. They continue after the command.

    Raises:
        OSError: the command cannot be started.
        subprocess.TimeoutExpired: the command did not end in time. All its processes were killed.
    """
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        env=env,
        start_new_session=True,
    )
    assert process.stdout is not None
    parts = OutputParts()
    with process.stdout:
        try:
            _read_output(process, parts, time.monotonic() + timeout_s)
        except TimeoutError:
            _kill(process)
            raise subprocess.TimeoutExpired(argv, timeout_s) from None
        except BaseException:
            _kill(process)
            raise
    return CommandOutput(process.wait(), parts.join())


def _read_output(process: subprocess.Popen[bytes], parts: OutputParts, deadline: float) -> None:
    """Read the output to the end of the command. Raises TimeoutError after the deadline."""
    assert process.stdout is not None
    is_open, left = True, _MAX_PIPE_BYTES
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            is_ended = process.poll() is not None  # before reading: the pipe then has the complete output
            if is_open and selector.select(0.0 if is_ended else _POLL_SECONDS):
                data = os.read(process.stdout.fileno(), _CHUNK_BYTES)
                parts.add(data)
                is_open = data != b""
                left -= len(data) if is_ended else 0
            elif is_ended:
                return
            elif not is_open:  # the command closed its output
                time.sleep(_CLOSED_SECONDS)
            if is_ended and left <= 0:  # a background process continues to print
                return
            if not is_ended and time.monotonic() >= deadline:
                raise TimeoutError


def _kill(process: subprocess.Popen[bytes]) -> None:
    signal_group(process.pid)
    wait_or_kill(process, _END_SECONDS)

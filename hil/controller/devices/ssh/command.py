"""One command on a channel: its input, its output within bounds, its end."""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Protocol

import paramiko

from hil.controller.devices.guard import Guard

MOST_OUT = 16 << 20
_LAST_OF_ERR = 64 << 10
_PIECE = 1 << 20
_LONGEST_GREETING = 1 << 20
# Said before a command begins: what comes before it is the login's own, lines that a .bashrc prints.
_BEGINS = b"hil: the command begins\n"


class Sink(Protocol):
    """What takes output."""

    def write(self, data: bytes, /) -> int:
        """Take a piece."""
        ...


class TooMuch(paramiko.SSHException):
    """The command wrote more than was agreed."""

    def __init__(self) -> None:
        super().__init__("it wrote more than it may")


def execute(
    transport: paramiko.Transport,
    command: str,
    source: IO[bytes],
    sink: Sink,
    timeout: float,
    most: int = MOST_OUT,
    progress: Callable[[int], None] | None = None,
) -> tuple[int, str]:
    """Run a command line; returns its exit code and the end of what it wrote to stderr.

    Args:
        transport: an open one.
        command: for the login's shell.
        source: what the command reads.
        sink: takes what it writes to stdout.
        timeout: seconds, for all of it.
        most: bytes that it may write to stdout.
        progress: told the bytes of each piece of the source that was sent.

    Raises:
        TimeoutError: it did not end in time.
        TooMuch: it wrote too much.
        EOFError: the link broke.
        OSError, paramiko.SSHException: it could not be started.
    """
    deadline = time.monotonic() + timeout

    def left() -> float:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        return seconds

    try:
        session = transport.open_session(timeout=timeout)
    except paramiko.SSHException as error:
        if transport.is_active() and "Timeout" in str(error):
            raise TimeoutError from error
        raise
    with contextlib.closing(session) as channel:
        begin(channel, command, timeout)
        errors = _Tail(channel)
        feed = (channel, source, progress)
        threading.Thread(target=_feed, args=feed, daemon=True, name="hil-ssh-input").start()
        taken = 0
        for piece in own_output(channel, left):
            taken += len(piece)
            if taken > most:
                raise TooMuch
            sink.write(piece)
        errors.thread.join(left())
        if errors.thread.is_alive() or not channel.status_event.wait(left()):
            raise TimeoutError
        if channel.exit_status == -1:
            raise EOFError("the channel was closed without an exit status")
        return channel.exit_status, errors.text()


def begin(channel: paramiko.Channel, command: str, timeout: float) -> None:
    """Start a command line; what it writes is to be read by :func:`own_output`.

    Raises:
        TimeoutError: the far side does not say in time whether it did.
        OSError, paramiko.SSHException: it could not be started.
    """
    guard = Guard(channel.close)  # paramiko itself waits for ever
    guard.within(timeout)
    try:
        channel.exec_command(f"echo {shlex.quote(_BEGINS.decode().strip())}; {command}")
    except (OSError, paramiko.SSHException) as error:
        if guard.expired:
            raise TimeoutError("it was not started in time") from error
        raise
    finally:
        guard.close()


def own_output(channel: paramiko.Channel, left: Callable[[], float | None]) -> Iterator[bytes]:
    """What a command itself writes to stdout, piece by piece: without the lines that a login prints before.

    Args:
        channel: on which it was begun.
        left: the seconds that the next piece may take; None is any time.

    Raises:
        TooMuch: the login itself writes without end.
    """
    before: bytes | None = b""
    while True:
        channel.settimeout(left())
        if not (piece := channel.recv(_PIECE)):
            break
        if before is None:
            yield piece
            continue
        before += piece
        if _BEGINS in before:
            own, before = before.partition(_BEGINS)[2], None
            if own:
                yield own
        elif len(before) > _LONGEST_GREETING:
            raise TooMuch
    if before:  # what ran was not what we asked for, and these are its words
        yield before


class _Tail:
    """The end of a channel's stderr, read as it comes so that the far side never waits for a reader."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self._kept = b""
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def text(self) -> str:
        return self._kept.decode(errors="replace")

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while piece := self._channel.recv_stderr(_LAST_OF_ERR):
                self._kept = (self._kept + piece)[-_LAST_OF_ERR:]


def _feed(channel: paramiko.Channel, source: IO[bytes], progress: Callable[[int], None] | None) -> None:
    # A command that ends before it has read everything closes the channel: what it made of it is told by its code. The
    # source may be closed by then, too, which is a ValueError.
    with contextlib.suppress(OSError, EOFError, ValueError):
        while piece := source.read(_PIECE):
            channel.sendall(piece)
            if progress:
                progress(len(piece))
        channel.shutdown_write()

"""Shell on a board: run commands and transfer files. A broken link raises BoardLost within a bounded time.

Every command runs in a new session as ``sh -s``, which reads its script from stdin. Scripts therefore do not depend on
the login shell.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hil.controller.devices.ssh.address import Address
from hil.controller.devices.ssh.transport import CommandReplaced, CommandSession, SessionRefused, TooMuch, Transport
from hil.core.files import open_file, read_text, replace_file
from hil.errors import BoardError, BoardLost, BoardRefused, StorageError

MAX_OUT = 16 << 20
_LAST_OF_ERR = 64 << 10
_PIECE = 1 << 20
_MAX_GREETING_LENGTH = 1 << 20
# Timeout in seconds to start a shell. A login shell runs start-up files first, which may be slow.
SHELL_START_SECONDS = 20.0
_AGAIN_SECONDS = 0.02

Sink = Callable[[bytes], object]
Progress = Callable[[int], None]


def execute(
    transport: Transport,
    line: str,
    source: IO[bytes] | None,
    sink: Sink,
    timeout: float,
    most: int = MAX_OUT,
    progress: Progress | None = None,
) -> tuple[int, str]:
    """Run a line of POSIX shell. Return the exit code and the end of stderr.

    Stdout goes to ``sink`` and is limited to ``most`` bytes. Raises EOFError for a broken link, TimeoutError, or
    :class:`TooMuch`.
    """
    deadline = time.monotonic() + timeout

    def seconds_left() -> float:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        return seconds

    with contextlib.closing(open_session(transport, timeout)) as session:
        errors = bytearray()
        reading = threading.Thread(target=_read_errors, args=(session, errors), daemon=True)
        reading.start()
        taken = 0
        try:
            pieces = begin(session, line, seconds_left)
        except CommandReplaced as error:
            reading.join(_END_SECONDS)
            error.text = error.text or errors.decode(errors="replace").strip()
            raise
        if source is None:
            with contextlib.suppress(OSError):
                session.shutdown_write()
        else:
            feed = (session, source, progress)
            threading.Thread(target=_feed, args=feed, daemon=True, name="hil-ssh-input").start()
        for piece in pieces:
            taken += len(piece)
            if taken > most:
                raise TooMuch
            sink(piece)
        reading.join(seconds_left())
        if reading.is_alive():
            raise TimeoutError
        return session.wait(seconds_left()), errors.decode(errors="replace")


def open_session(transport: Transport, timeout: float) -> CommandSession:
    """Start a POSIX shell that reads its script from stdin, so that the login shell never parses hil's scripts.

    If the server refuses another session (MaxSessions), retry while other sessions are open. Raises SessionRefused,
    EOFError, TimeoutError or OSError.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            return transport.start("sh -s", max(deadline - time.monotonic(), _AGAIN_SECONDS))
        except SessionRefused:
            if time.monotonic() > deadline:
                raise
            time.sleep(_AGAIN_SECONDS)


def begin(session: CommandSession, line: str, left: Callable[[], float | None]) -> Iterator[bytes]:
    """Run a line in a shell, and wait until it starts. Return an iterator over stdout.

    Drops output of the login itself, such as from .bashrc. The caller may write to stdin only after this call, because
    a shell reads ahead and would execute the data. ``left`` returns the seconds that the next piece may take; None
    means no limit. The start is limited to ``SHELL_START_SECONDS`` as well.

    Raises CommandReplaced, and the errors of :func:`execute`.
    """
    mark = f"hil-{secrets.token_hex(16)}"
    with contextlib.suppress(OSError):  # a program that does not read stdin may still print the reason
        session.sendall(f"echo {mark}; {line}; exit $?\n".encode(errors="surrogateescape"))
    wanted, before = f"{mark}\n".encode(), b""

    def iter_rest(left: Callable[[], float | None]) -> Iterator[bytes]:
        session.settimeout(left())
        while piece := session.recv(_PIECE):
            yield piece
            session.settimeout(left())

    deadline = time.monotonic() + SHELL_START_SECONDS

    def seconds_left_to_start() -> float:
        if (seconds := deadline - time.monotonic()) <= 0:
            raise CommandReplaced(before.decode(errors="replace").strip(), None)
        own = left()
        return seconds if own is None else min(own, seconds)

    try:
        for piece in iter_rest(seconds_left_to_start):
            before += piece
            if wanted in before:
                own = before.partition(wanted)[2]
                return itertools.chain([own] if own else [], iter_rest(left))
            if len(before) > _MAX_GREETING_LENGTH:
                raise TooMuch
    except TimeoutError:
        seconds_left_to_start()
        raise
    raise CommandReplaced(before.decode(errors="replace").strip(), session.wait(left() or _PATIENCE_SECONDS))


def _read_errors(session: CommandSession, kept: bytearray) -> None:
    """Read a command's stderr continuously so that the command never blocks. Retain only the end."""
    with contextlib.suppress(OSError):
        while piece := session.recv_stderr(_LAST_OF_ERR):
            kept += piece
            del kept[:-_LAST_OF_ERR]


def _feed(session: CommandSession, source: IO[bytes], progress: Progress | None) -> None:
    # Ignore errors: a command that exits early closes stdin, and its exit code shows the result. The source may also be
    # closed, which raises ValueError.
    with contextlib.suppress(OSError, EOFError, ValueError):
        while piece := source.read(_PIECE):
            session.sendall(piece)
            if progress:
                progress(len(piece))
        session.shutdown_write()


# Timeout in seconds for one response of the board, and speed of the slowest supported link.
_PATIENCE_SECONDS = 60.0
_MIN_BYTES_PER_SECOND = 10_000
_PUT = read_text(Path(__file__).with_name("put.sh"))


def _compute_patience(size: int) -> float:
    """Return the time limit in seconds for transferring ``size`` bytes."""
    return _PATIENCE_SECONDS + size / _MIN_BYTES_PER_SECOND


_MAX_NAME_LENGTH = 80
_END_SECONDS = 3.0


@dataclass(frozen=True)
class Done:
    """Result of a command: the exit code (128 + N for signal N), stdout, and the last 64 KiB of stderr."""

    argv: tuple[str, ...]
    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        """Stdout as text without surrounding whitespace."""
        return self.out.decode(errors="replace").strip()


class Shell:
    """Login on a board. Thread-safe.

    Attributes:
        address: ``USER@HOST[:PORT]``, for messages.
        fingerprint: Fingerprint of the board's host key.
        transport: The underlying transport.
    """

    def __init__(self, transport: Transport, address: Address, board: str) -> None:
        self.board = board
        self.transport = transport
        self.user, self.fingerprint = transport.user, transport.fingerprint
        self.address = str(Address(address.host, transport.user, transport.port or address.port))

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | Path | None = None,
        timeout: float = 30.0,
        check: bool = True,
        progress: Progress | None = None,
    ) -> Done:
        """Run a command and wait for the end. No shell expands the arguments.

        Args:
            stdin: Bytes or a file to send as stdin. By default stdin is empty.
            check: Whether a nonzero exit code raises an error.
            progress: Called with the size of every piece of ``stdin`` after sending it.

        Raises:
            BoardError: The command failed, or wrote more than 16 MiB.
            BoardRefused: The login runs another command instead.
            BoardLost: The command did not end in time, or the link broke.
        """
        line = shlex.join(argv)
        name = line if len(line) < _MAX_NAME_LENGTH else f"{line[:_MAX_NAME_LENGTH]}..."
        out = io.BytesIO()
        source = open_file(stdin) if isinstance(stdin, Path) else io.BytesIO(stdin) if stdin else None
        with source or contextlib.nullcontext(), self._translate_errors(f"`{name}`", f"`{name}` was not started"):
            try:
                code, err = execute(self.transport, line, source, out.write, timeout, progress=progress)
            except TimeoutError:
                raise BoardLost(f"`{name}` did not respond within {timeout:g} s", board=self.board) from None
            except TooMuch:
                raise BoardError(f"`{name}` wrote more than {MAX_OUT >> 20} MiB", board=self.board) from None
        if check and code:
            raise BoardError(f"`{name}` failed with code {code}", board=self.board, detail=err.strip())
        return Done(tuple(argv), code, out.getvalue(), err)

    def put(self, local: Path, remote: str, *, mode: int = 0o600, progress: Progress | None = None) -> None:
        """Send a file. The file is renamed to the final name when complete, and replaces an existing file.

        Raises:
            BoardError: The file cannot be written. The directory must exist.
            BoardLost: The link broke.
        """
        part, size = f"{remote}.{secrets.token_hex(4)}.part", local.stat().st_size
        line = shlex.join(["sh", "-c", _PUT, "sh", part, str(size), f"{mode:o}", remote])
        with open_file(local) as source, self._translate_errors(f"writing {remote}", f"cannot write {remote}"):
            self._move(line, source, lambda piece: None, size, MAX_OUT, progress)

    def get(self, remote: str, local: Path, most: int) -> None:
        """Fetch a file of at most ``most`` bytes. The local file appears only when complete.

        Raises:
            BoardError: The remote file cannot be read or is too large.
            BoardLost: The link broke.
            StorageError: The local file cannot be written.
        """
        reading = self._translate_errors(f"reading {remote}", f"cannot read {remote}")

        def make_write_error(error: OSError) -> StorageError:
            return StorageError(f"cannot write {local}: {error.strerror}")

        def write(piece: bytes) -> None:
            try:
                sink.write(piece)
            except OSError as error:  # an error of this machine, not of the board
                raise make_write_error(error) from error

        try:
            with replace_file(local) as part, part.open("wb") as sink, reading:
                self._move(shlex.join(["cat", "--", remote]), None, write, most, most)
        except OSError as error:  # close() flushes the last piece
            raise make_write_error(error) from error

    def interactive(self, argv: Sequence[str] = ()) -> int:
        """Run a command or the login shell on the terminal. Return the exit code.

        OpenSSH's client reports connection errors itself and exits with 255.
        """
        with self._translate_errors("the terminal", "no terminal"):
            return self.transport.interactive(_line_for_any_shell(argv) if argv else "")

    def close(self) -> None:
        """Log out."""
        self.transport.close()

    def is_alive(self) -> bool:
        """Return whether the link is open. A broken link is detected within 15 seconds."""
        return not self.transport.has_ended()

    def _move(
        self, line: str, source: IO[bytes] | None, sink: Sink, size: int, most: int, progress: Progress | None = None
    ) -> None:
        code, err = execute(self.transport, line, source, sink, _compute_patience(size), most=most, progress=progress)
        if code:
            raise _CommandFailed(err.strip() or f"code {code}")

    @contextlib.contextmanager
    def _translate_errors(self, what: str, failed: str) -> Iterator[None]:
        """Translate transport errors: BoardLost if the link broke during ``what``, else BoardError (``failed``)."""
        try:
            yield
        except CommandReplaced as error:
            raise self._make_replaced_error(error) from error
        except (EOFError, OSError) as error:
            # A session detects the end before the transport does, so wait a moment for the transport.
            within_s = 0.0 if isinstance(error, (TooMuch, SessionRefused, _CommandFailed)) else _END_SECONDS
            if isinstance(error, TimeoutError) or self.transport.has_ended(within_s):
                raise BoardLost(f"the connection to {self.address} broke during {what}", board=self.board) from error
            raise BoardError(f"{failed}: {error}", board=self.board) from error

    def _make_replaced_error(self, error: CommandReplaced) -> BoardRefused:
        words = error.text.rpartition("\n")[2][:_MAX_NAME_LENGTH]
        wrote = f"wrote {words!r} and " if words else ""
        ended = (
            f"did not end within {SHELL_START_SECONDS:g} s" if error.code is None else f"ended with code {error.code}"
        )
        return BoardRefused(
            f"{self.address} does not run hil's commands: a different program {wrote}{ended}",
            board=self.board,
            hint="use a login with a POSIX sh that can run `sh -s`, without a forced command (ForceCommand in "
            "sshd_config, or command=... before the key in authorized_keys)",
            detail=error.text,
        )


class _CommandFailed(OSError):
    """A file transfer command failed on the board; the text is stderr."""


# Characters that a non-POSIX login shell may interpret inside quotes.
_READ_OTHERWISE = set("!\\\n")


def _line_for_any_shell(argv: Sequence[str]) -> str:
    """Return a command line that tcsh and fish read as a POSIX shell does."""
    line = shlex.join(argv)
    if not _READ_OTHERWISE & set(line):
        return line
    # Replace every byte that a shell might interpret by an octal escape.
    safe = "".join(chr(byte) if chr(byte).isalnum() and byte < 128 else f"\\0{byte:03o}" for byte in line.encode())
    return f"sh -c 'eval \"$(printf %b \"$1\")\"' sh '{safe}'"

"""A shell on a board: run commands, move files. A link that breaks ends in BoardLost, within a time that is bounded.

Files go by SFTP, or through ``cat`` where a board has no SFTP server.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shlex
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import paramiko

from hil.controller.devices.guard import Guard
from hil.controller.devices.ssh import openssh
from hil.controller.devices.ssh.address import Address
from hil.controller.devices.ssh.transport import Hop, close_hops
from hil.core.files import replacing
from hil.errors import BoardError, BoardLost, StorageError

MOST_OUT = 16 << 20
_LAST_OF_ERR = 64 << 10
_PIECE = 1 << 20
_LONGEST_GREETING = 1 << 20
# Said before a command begins: what comes before it is the login's own, lines that a .bashrc prints.
_BEGINS = b"hil: the command begins\n"


Sink = Callable[[bytes], object]
Progress = Callable[[int], None]


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
    progress: Progress | None = None,
) -> tuple[int, str]:
    """Run a command line of the login's shell; returns its exit code and the end of what it wrote to stderr.

    It may write ``most`` bytes to stdout, which go to the sink. Errors are Python's own and paramiko's: EOFError where
    the link broke, TimeoutError, :class:`TooMuch`.
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
        errors = bytearray()
        reading = threading.Thread(target=_read_errors, args=(channel, errors), daemon=True)
        reading.start()
        feed = (channel, source, progress)
        threading.Thread(target=_feed, args=feed, daemon=True, name="hil-ssh-input").start()
        taken = 0
        for piece in own_output(channel, left):
            taken += len(piece)
            if taken > most:
                raise TooMuch
            sink(piece)
        reading.join(left())
        if reading.is_alive() or not channel.status_event.wait(left()):
            raise TimeoutError
        if channel.exit_status == -1:
            raise EOFError("the channel was closed without an exit status")
        return channel.exit_status, errors.decode(errors="replace")


def begin(channel: paramiko.Channel, command: str, timeout: float) -> None:
    """Start a command line, in time (TimeoutError); what it writes is to be read by :func:`own_output`."""
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

    ``left`` gives the seconds that the next piece may take; None is any time.
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


def _read_errors(channel: paramiko.Channel, kept: bytearray) -> None:
    """Read a channel's stderr as it comes, so that the far side never waits for a reader; its end is kept."""
    with contextlib.suppress(OSError):
        while piece := channel.recv_stderr(_LAST_OF_ERR):
            kept += piece
            del kept[:-_LAST_OF_ERR]


def _feed(channel: paramiko.Channel, source: IO[bytes], progress: Progress | None) -> None:
    # A command that ends before it has read everything closes the channel: what it made of it is told by its code. The
    # source may be closed by then, too, which is a ValueError.
    with contextlib.suppress(OSError, EOFError, ValueError):
        while piece := source.read(_PIECE):
            channel.sendall(piece)
            if progress:
                progress(len(piece))
        channel.shutdown_write()


# The longest that the board may take for one answer; the slowest link that is worth waiting for.
_PATIENCE_S = 60.0
_SLOWEST_BYTES_S = 10_000
# What paramiko raises for answers that make no sense.
_NONSENSE = (paramiko.SFTPError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, struct.error)
# What OpenSSH's server takes in one request; every other must take 32 KiB.
_SFTP_PIECE = 255 * 1024
_SMALL_PIECE = 32 * 1024
_AT_ONCE = 64


class Files:
    """What moves files over a transport. Errors are Python's own and paramiko's, as of :func:`execute`."""

    def __init__(self, transport: paramiko.Transport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._channel: paramiko.Channel | None = None
        self._client: paramiko.SFTPClient | None = None
        self._by_cat = False
        self._piece = _SFTP_PIECE if "OpenSSH" in transport.remote_version else _SMALL_PIECE

    def put(self, source: IO[bytes], remote: str, part: str, mode: int, progress: Progress | None) -> None:
        """Write a file under the name ``part``, then give it its own."""
        size = os.fstat(source.fileno()).st_size
        with self._lock, self._in_time(size) as sftp:
            if sftp is None:
                script = 'umask 077 && cat > "$1" && chmod "$2" "$1" && mv -f "$1" "$3" || { rm -f "$1"; exit 1; }'
                argv = ["sh", "-c", script, "sh", part, f"{mode:o}", remote]
                return self._cat(argv, source, lambda piece: None, size, MOST_OUT, progress)
            try:
                self._write(sftp, source, part, mode, progress)
                sftp.posix_rename(part, remote)
            except (OSError, KeyboardInterrupt):
                with contextlib.suppress(OSError, EOFError):
                    sftp.remove(part)
                raise

    def get(self, remote: str, sink: Sink, most: int) -> None:
        """Read a file of at most so many bytes."""
        with self._lock, self._in_time(most) as sftp:
            if sftp is None:
                return self._cat(["cat", "--", remote], io.BytesIO(), sink, most, most)
            with sftp.open(remote, "rb") as file:
                file.MAX_REQUEST_SIZE = self._piece
                size = file.stat().st_size or 0
                if size > most:
                    raise OSError(f"it has {size} bytes, at most {most} are expected")
                file.prefetch(size, _AT_ONCE)
                came = 0
                while piece := file.read(self._piece):
                    came += len(piece)
                    if came > most:
                        raise OSError(f"more than {most} bytes came")
                    sink(piece)
            if came < size:
                raise OSError(f"{came} of {size} bytes came")

    @contextlib.contextmanager
    def _in_time(self, size: int) -> Iterator[paramiko.SFTPClient | None]:
        """The one client, None where the board has no server for it; one that goes on and on is closed."""
        # paramiko itself notices silence, and that not everywhere.
        guard = Guard(self._close)
        guard.within(_patience_s(size))
        try:
            yield self._sftp()
        except (EOFError, OSError, paramiko.SSHException, *_NONSENSE) as error:
            if guard.expired:
                self._client = None
                raise TimeoutError(f"it took longer than {_patience_s(size):.0f} s") from error
            if isinstance(error, _NONSENSE):
                raise OSError(f"its SFTP server's answers make no sense: {error}") from error
            raise
        finally:
            guard.close()

    def _close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _write(
        self, sftp: paramiko.SFTPClient, source: IO[bytes], part: str, mode: int, progress: Progress | None
    ) -> None:
        sent = 0
        with sftp.open(part, "wb") as file:
            file.chmod(mode)
            file.MAX_REQUEST_SIZE = self._piece
            file.set_pipelined(True)
            while piece := source.read(self._piece):
                file.write(piece)
                sent += len(piece)
                if progress:
                    progress(len(piece))
        # Answers to the last requests are dropped by paramiko, with the errors in them: this tells.
        there = sftp.stat(part).st_size
        if there != sent:
            raise OSError(f"{there} of {sent} bytes arrived; is the disk full?")

    def _sftp(self) -> paramiko.SFTPClient | None:
        """The one client, None where the board has no server for it."""
        if self._client is None and not self._by_cat:
            channel = self._channel = self._transport.open_session(timeout=_PATIENCE_S)
            channel.settimeout(_PATIENCE_S)
            try:
                channel.invoke_subsystem("sftp")
                self._client = paramiko.SFTPClient(channel)
            # SFTPError: what answers first is a line that the login prints, and no server.
            except (paramiko.SSHException, EOFError, *_NONSENSE):
                channel.close()
                if not self._transport.is_active():
                    raise
                self._by_cat = True
        return self._client

    def _cat(
        self, argv: list[str], source: IO[bytes], sink: Sink, size: int, most: int, progress: Progress | None = None
    ) -> None:
        line = shlex.join(argv)
        code, err = execute(self._transport, line, source, sink, _patience_s(size), most=most, progress=progress)
        if code:
            raise OSError(err.strip() or f"code {code}")


def _patience_s(size: int) -> float:
    """The longest that moving so many bytes may take."""
    return _PATIENCE_S + size / _SLOWEST_BYTES_S


_LONGEST_NAME = 80
_END_S = 3.0


@dataclass(frozen=True)
class Done:
    """How a command ended: its exit code, 128 + N where signal N ended it, and the last 64 KiB of stderr."""

    argv: tuple[str, ...]
    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        """``out`` as text, without space around it."""
        return self.out.decode(errors="replace").strip()


class Shell:
    """A login on a board; several threads may use it at the same time.

    Attributes:
        address: ``USER@HOST[:PORT]``, for messages.
        hops: the machines that we are logged in to; the last is the board.
    """

    def __init__(self, hops: tuple[Hop, ...], address: Address, board: str) -> None:
        self.hops = hops
        self.board = board
        board_hop = hops[-1]
        self.user: str = board_hop.connection.user
        self.address = str(Address(address.host, self.user, board_hop.connection.port))
        self.fingerprint: str = board_hop.host_key.fingerprint
        self.transport = board_hop.transport
        self.transport.watch(lambda: close_hops(hops))
        self._files = Files(self.transport)

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
        """Run a command and wait for its end; nothing in its arguments is expanded.

        Args:
            stdin: what it reads: bytes, or a file's contents; otherwise it finds the end at once.
            check: whether a code other than 0 is an error.
            progress: told the bytes of each piece of ``stdin`` that was sent.

        Raises:
            BoardError: it failed, or wrote more than 16 MiB.
            BoardLost: it did not end in time, or the link broke.
        """
        line = shlex.join(argv)
        name = line if len(line) < _LONGEST_NAME else f"{line[:_LONGEST_NAME]}..."
        out = io.BytesIO()
        source = stdin.open("rb") if isinstance(stdin, Path) else io.BytesIO(stdin or b"")
        with source, self._seam(f"`{name}`", f"`{name}` was not started"):
            try:
                code, err = execute(self.transport, line, source, out.write, timeout, progress=progress)
            except TimeoutError:
                raise BoardLost(f"`{name}` did not answer within {timeout:g} s", board=self.board) from None
            except TooMuch:
                raise BoardError(f"`{name}` wrote more than {MOST_OUT >> 20} MiB", board=self.board) from None
        if check and code:
            raise BoardError(f"`{name}` failed with code {code}", board=self.board, detail=err.strip())
        return Done(tuple(argv), code, out.getvalue(), err)

    def put(self, local: Path, remote: str, *, mode: int = 0o600, progress: Progress | None = None) -> None:
        """Send a file. It appears under its name once it is complete, and replaces what had that name.

        Raises:
            BoardError: it cannot be written there: its folder must be there.
            BoardLost: the link broke.
        """
        part = f"{remote}.{secrets.token_hex(4)}.part"
        with local.open("rb") as source, self._seam(f"writing {remote}", f"cannot write {remote}"):
            self._files.put(source, remote, part, mode, progress)

    def get(self, remote: str, local: Path, most: int) -> None:
        """Fetch a file of at most so many bytes; it appears here once it is complete.

        Raises:
            BoardError: it cannot be read there, or is larger.
            BoardLost: the link broke.
            StorageError: it cannot be written here.
        """
        reading = self._seam(f"reading {remote}", f"cannot read {remote}")

        def cannot(error: OSError) -> StorageError:
            return StorageError(f"cannot write {local}: {error.strerror}")

        def write(piece: bytes) -> None:
            try:
                sink.write(piece)
            except OSError as error:  # of this machine's, not of the board's
                raise cannot(error) from error

        try:
            with replacing(local) as part, part.open("wb") as sink, reading:
                self._files.get(remote, write, most)
        except OSError as error:  # the last piece of a file is written when it is closed
            raise cannot(error) from error

    def interactive(self, argv: Sequence[str] = ()) -> int:
        """Give the terminal to a command, or to the login's own shell; returns its exit code.

        OpenSSH's client, where there is one, says itself what went wrong with the link, and ends with 255.
        """
        if openssh.can_log_in(self.hops):
            with openssh.private_folder() as folder:
                terminal = ["-t"] if sys.stdin.isatty() else []
                command = [*openssh.command(self.hops, folder), *terminal, openssh.BOARD]
                return subprocess.call([*command, shlex.join(argv)] if argv else command)
        with self._seam("the terminal", "no terminal"):
            line = shlex.join(argv) or 'exec "$SHELL" -l'
            code: int = self.hops[-1].connection.run(line, pty=True, warn=True).exited
            return code

    def close(self) -> None:
        """Log out."""
        close_hops(self.hops)

    def is_alive(self) -> bool:
        """Whether the link is up, as far as is known: a broken one is noticed within 15 seconds."""
        return self.transport.is_active()

    @contextlib.contextmanager
    def _seam(self, what: str, failed: str) -> Iterator[None]:
        """paramiko's errors and those of sockets become ours: the link broke during ``what``, or else ``failed``."""
        try:
            yield
        except (paramiko.SSHException, EOFError, OSError) as error:
            if not isinstance(error, OSError) or "closed" in str(error):
                # The end of a link is told to its channels before it is to be seen in the transport.
                self.transport.join(_END_S)
            if isinstance(error, TimeoutError) or not self.transport.is_active():
                raise BoardLost(f"the connection to {self.address} broke during {what}", board=self.board) from error
            raise BoardError(f"{failed}: {error}", board=self.board) from error

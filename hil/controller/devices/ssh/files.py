"""Files to and from a board: by SFTP, or through ``cat`` where a board has no SFTP server."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import struct
import threading
from collections.abc import Callable, Iterator
from typing import IO

import paramiko

from hil.controller.devices.guard import Guard
from hil.controller.devices.ssh.command import MOST_OUT, Sink, execute

# The longest that the board may take for one answer; the slowest link that is worth waiting for.
_PATIENCE_S = 60.0
_SLOWEST_BYTES_S = 10_000
# What paramiko raises for answers that make no sense.
_NONSENSE = (paramiko.SFTPError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, struct.error)
# What OpenSSH's server takes in one request; every other must take 32 KiB.
_PIECE = 255 * 1024
_SMALL_PIECE = 32 * 1024
_AT_ONCE = 64
Progress = Callable[[int], None]


class Files:
    """What moves files over a transport."""

    def __init__(self, transport: paramiko.Transport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._channel: paramiko.Channel | None = None
        self._client: paramiko.SFTPClient | None = None
        self._by_cat = False
        self._piece = _PIECE if "OpenSSH" in transport.remote_version else _SMALL_PIECE

    def put(self, source: IO[bytes], remote: str, part: str, mode: int, progress: Progress | None) -> None:
        """Write a file under the name ``part``, then give it its own.

        Raises:
            TimeoutError, EOFError, OSError, paramiko.SSHException: it could not be done.
        """
        size = os.fstat(source.fileno()).st_size
        with self._lock, self._in_time(size) as sftp:
            if sftp is None:
                script = 'umask 077 && cat > "$1" && chmod "$2" "$1" && mv -f "$1" "$3" || { rm -f "$1"; exit 1; }'
                argv = ["sh", "-c", script, "sh", part, f"{mode:o}", remote]
                return self._cat(argv, source, io.BytesIO(), size, MOST_OUT, progress)
            try:
                self._write(sftp, source, part, mode, progress)
                sftp.posix_rename(part, remote)
            except (OSError, KeyboardInterrupt):
                with contextlib.suppress(OSError, EOFError):
                    sftp.remove(part)
                raise

    def get(self, remote: str, sink: Sink, most: int) -> None:
        """Read a file of at most so many bytes.

        Raises:
            TimeoutError, EOFError, OSError, paramiko.SSHException: it could not be done.
        """
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
                    sink.write(piece)
            if came < size:
                raise OSError(f"{came} of {size} bytes came")

    @contextlib.contextmanager
    def _in_time(self, size: int) -> Iterator[paramiko.SFTPClient | None]:
        """The one client, None where the board has no server for it; one that goes on and on is closed.

        Raises:
            TimeoutError: so many bytes were not moved in time.
            OSError: the server's answers make no sense.
        """
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

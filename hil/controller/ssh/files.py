"""Files to and from a board: by SFTP, or through ``cat`` where a board has no SFTP server."""

from __future__ import annotations

import contextlib
import io
import shlex
import threading
from collections.abc import Callable
from typing import IO

import paramiko

from hil.controller.ssh.command import Sink, execute

# The longest that the board may take for one answer; by `cat`, for the whole file.
_PATIENCE_S = 60.0
_PATIENCE_BY_CAT_S = 3600.0
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
        self._client: paramiko.SFTPClient | None = None
        self._by_cat = False
        self._piece = _PIECE if "OpenSSH" in transport.remote_version else _SMALL_PIECE

    def put(self, source: IO[bytes], remote: str, part: str, mode: int, progress: Progress | None) -> None:
        """Write a file under the name ``part``, then give it its own.

        Raises:
            TimeoutError, EOFError, OSError, paramiko.SSHException: it could not be done.
        """
        with self._lock:
            sftp = self._sftp()
            if sftp is None:
                script = 'umask 077 && cat > "$1" && chmod "$2" "$1" && mv -f "$1" "$3" || { rm -f "$1"; exit 1; }'
                return self._cat(["sh", "-c", script, "sh", part, f"{mode:o}", remote], source, None, progress)
            try:
                self._write(sftp, source, part, mode, progress)
                sftp.posix_rename(part, remote)
            except (OSError, KeyboardInterrupt):
                with contextlib.suppress(OSError, EOFError):
                    sftp.remove(part)
                raise

    def get(self, remote: str, sink: Sink) -> None:
        """Read a file.

        Raises:
            TimeoutError, EOFError, OSError, paramiko.SSHException: it could not be done.
        """
        with self._lock:
            sftp = self._sftp()
            if sftp is None:
                return self._cat(["cat", "--", remote], None, sink, None)
            with sftp.open(remote, "rb") as file:
                file.MAX_REQUEST_SIZE = self._piece
                size = file.stat().st_size or 0
                file.prefetch(size, _AT_ONCE)
                came = 0
                while piece := file.read(self._piece):
                    sink.write(piece)
                    came += len(piece)
            if came < size:
                raise OSError(f"{came} of {size} bytes came")

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
            channel = self._transport.open_session(timeout=_PATIENCE_S)
            channel.settimeout(_PATIENCE_S)
            try:
                channel.invoke_subsystem("sftp")
                self._client = paramiko.SFTPClient(channel)
            # SFTPError: what answers first is a line that the login prints, and no server.
            except (paramiko.SSHException, paramiko.SFTPError, EOFError):
                channel.close()
                if not self._transport.is_active():
                    raise
                self._by_cat = True
        return self._client

    def _cat(self, argv: list[str], source: IO[bytes] | None, sink: Sink | None, progress: Progress | None) -> None:
        code, err = execute(
            self._transport,
            shlex.join(argv),
            source or io.BytesIO(),
            sink or io.BytesIO(),
            _PATIENCE_BY_CAT_S,
            most=1 << 62,
            progress=progress,
        )
        if code:
            raise OSError(err.strip() or f"code {code}")

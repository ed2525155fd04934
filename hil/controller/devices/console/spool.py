"""Share a console between processes of a user.

Only one process can read a serial port. The process that holds the lock of a spool reads the console and appends the
lines to a file. The other processes read this file. Therefore `hil board console` works during a run, and shows lines
from before its start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from hil.controller.devices.console.lines import ConsoleLine
from hil.controller.records.console import ConsoleEntry
from hil.core.console_config import ConsoleConfig
from hil.core.digest import digest_of
from hil.core.files import open_file
from hil.errors import StorageError

# Size of a file at which a new one starts. hil keeps one earlier file.
MAX_FILE_BYTES = 4 << 20
_LINES, _EARLIER, _LOCK = "lines.jsonl", "lines-1.jsonl", "lock"
# A line has at most 4 KiB, which JSON can escape to six times the size.
_MAX_ENTRY_BYTES = 1 << 16

_encoder, _decoder = msgspec.json.Encoder(), msgspec.json.Decoder(ConsoleEntry)


def find_spool(console: ConsoleConfig) -> Spool:
    """Return the spool of a console: consoles with the same link share it. Raises StorageError."""
    import platformdirs

    link = str(Path(console.serial).resolve()) if console.serial else console.address or "\0".join(console.command)
    link = link or f"farm\0{console.farm}"  # hil does not store these lines
    name = digest_of(link.encode()).partition(":")[2][:16]
    return Spool(Path(platformdirs.user_cache_dir("hil", appauthor=False)) / "consoles" / name)


class Spool:
    """Directory with the latest lines of a console."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            status = folder.lstat()
        except OSError as error:
            raise StorageError(f"{folder} cannot be created: {error.strerror or error}") from error
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise StorageError(f"other users may write to {folder}", hint=f"chmod 700 {folder}, or remove it")

    @property
    def is_ours(self) -> bool:
        """True if this object holds the lock."""
        return self._lock is not None

    def try_lock(self) -> bool:
        """Become the process that reads the console. Return False if another process reads it. Raises StorageError."""
        if self._lock is not None:
            return True
        try:
            lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be locked: {error.strerror or error}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    def unlock(self) -> None:
        """Let another process read the console."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def append(self, lines: Iterable[ConsoleLine]) -> None:
        """Append lines. Only the process with the lock calls this method. Raises StorageError."""
        data = b"".join(encode_entry(make_entry(line)) for line in lines)
        path = self.folder / _LINES
        try:
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_size + len(data) > MAX_FILE_BYTES:
                    path.replace(self.folder / _EARLIER)
            at = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(at, "wb") as file:
                file.write(data)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error

    def read_since(self, time_s: float) -> list[ConsoleLine]:
        """Return the stored lines from a time in seconds since the epoch."""
        found = [line for name in (_EARLIER, _LINES) for line in _read_lines(self.folder / name)]
        return [line for line in found if line.time_s >= time_s]

    def follow(self) -> SpoolFollower:
        """Return a reader of lines that other processes append from now on."""
        return SpoolFollower(self.folder / _LINES)


class SpoolFollower:
    """Reads the lines that another process appends to a spool."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._rest = b""
        self._open(os.SEEK_END)

    def _open(self, whence: int) -> None:
        self.close()
        self._rest = b""
        with contextlib.suppress(OSError):
            self._file = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._file, 0, whence)

    def read_new(self) -> list[ConsoleLine]:
        """Return the new lines, at most about 1 MiB at once."""
        if self._file < 0:
            self._open(os.SEEK_SET)
            if self._file < 0:
                return []
        data = os.read(self._file, 1 << 20)
        if not data and self._is_replaced():
            self._open(os.SEEK_SET)
            data = os.read(self._file, 1 << 20) if self._file >= 0 else b""
        *entries, rest = (self._rest + data).split(b"\n")
        self._rest = rest if len(rest) <= _MAX_ENTRY_BYTES else b""
        return list(_parse_entries(entries))

    def _is_replaced(self) -> bool:
        try:
            return not os.path.samestat(os.fstat(self._file), self._path.stat())
        except OSError:
            return False

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def make_entry(line: ConsoleLine, board_ns: int | None = None) -> ConsoleEntry:
    """Return a line's record."""
    return ConsoleEntry(host_ns=line.host_ns, board_ns=board_ns, time_s=line.time_s, kind=line.kind, text=line.text)


def encode_entry(entry: ConsoleEntry) -> bytes:
    """Return a record as a line of JSON."""
    return _encoder.encode(entry) + b"\n"


def _read_lines(path: Path) -> Iterator[ConsoleLine]:
    with contextlib.suppress(OSError), open_file(path) as file:
        yield from _parse_entries(file.read(2 * MAX_FILE_BYTES).split(b"\n"))


def _parse_entries(entries: Iterable[bytes]) -> Iterator[ConsoleLine]:
    """Return the valid lines. A killed process may have left a part of a line."""
    for entry in entries:
        with contextlib.suppress(msgspec.DecodeError, UnicodeError):
            found = _decoder.decode(entry)
            yield ConsoleLine(found.host_ns, found.time_s, found.text, found.kind)

"""Read and hash regular files with a size limit, and write files atomically."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from hil.core.cancellation import check_cancelled
from hil.core.digest import DEFAULT, make_hasher
from hil.errors import UnreadableFile, UsageError, did_you_mean

# Size limit for hand-written text such as configs, flag files and lists.
MAX_TEXT_BYTES = 16 << 20
# Size limit for records that hil writes, such as run.json.
MAX_FILE_BYTES = 1 << 30
# Limit for models and programs: half of the machine's memory.
MAX_MODEL_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
# Bytes to read from a log when quoting its end.
MAX_LOG_BYTES = 1 << 20
_PIECE = 1 << 20
# Maximum number of names in a directory to compare with the name of a missing file.
_MAX_NAMES = 2000
_DIGEST_PIECE = 4 << 20
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading. Links are followed.

    Opening never blocks and never triggers a device.

    Raises:
        UnreadableFile: the path is a directory, pipe, socket or device, or is invalid.
        OSError: the file is missing or cannot be read.
    """
    # Check before opening: opening some devices already has side effects.
    _require_regular(path, _read_mode(path))
    file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115 (the caller closes it)
    try:
        _require_regular(path, os.fstat(file.fileno()).st_mode)
    except BaseException:
        file.close()
        raise
    return file


def read_file(path: Path, most: int = MAX_FILE_BYTES) -> bytes:
    """Read a regular file.

    Args:
        most: maximum number of bytes.

    Raises:
        UnreadableFile: see :func:`open_file`; or the file is larger.
        OSError: see :func:`open_file`.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        # Python allocates the full requested size, so do not request the limit.
        data = b"" if size > most else file.read(size + 1)
        # The file has grown since then, or the system does not report its size.
        while size < len(data) <= most and (piece := file.read(_PIECE)):
            data += piece
    if max(size, len(data)) > most:
        raise _make_unreadable_error(str(path), f"has {max(size, len(data))} bytes, at most {most} are allowed")
    return data


def read_text(path: Path, most: int = MAX_TEXT_BYTES, *, errors: str = "strict") -> str:
    """Read a regular file as UTF-8 text.

    Args:
        most: maximum number of bytes.
        errors: error handling for invalid UTF-8, as in :meth:`bytes.decode`.

    Raises:
        UnreadableFile, OSError: see :func:`read_file`.
        UnicodeDecodeError: the file is not UTF-8.
    """
    return read_file(path, most).decode(errors=errors).replace("\r\n", "\n")


def read_end(path: Path, most: int = MAX_LOG_BYTES) -> str:
    """Read the last bytes of a regular file, such as a log, as text.

    Args:
        most: number of bytes to read.

    Raises:
        UnreadableFile, OSError: see :func:`open_file`.
    """
    with open_file(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read(most).decode(errors="replace")


def digest_file(path: Path, algorithm: str = DEFAULT) -> str:
    """Return a file's digest. Bytes that are appended during the read are ignored.

    Uses reads rather than a memory map: truncating a mapped file would kill this process with SIGBUS.

    Raises:
        UnreadableFile, OSError: see :func:`open_file`.
    """
    with open_file(path) as file:
        left = os.fstat(file.fileno()).st_size
        hasher = make_hasher(left, algorithm)
        while piece := file.read(min(left, _DIGEST_PIECE)):
            check_cancelled()
            hasher.update(piece)
            left -= len(piece)
    return hasher.digest()


class FileReader:
    """Reader of parts of a regular file. Close it after use, or use it as a context manager.

    Use this, not :func:`map_file`, for files that other programs may change. If a mapped file becomes shorter, the
    system kills the process with SIGBUS.

    Attributes:
        size: size in bytes at the time of opening.

    Raises:
        UnreadableFile, OSError: see :func:`open_file`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_file(path)
        self.size = os.fstat(self._file.fileno()).st_size

    def read(self, start: int, size: int) -> memoryview:
        """Read exactly these bytes.

        Raises:
            UnreadableFile: the file has fewer bytes.
            OSError: the bytes cannot be read.
        """
        self._file.seek(start)
        # Python allocates the requested size before it reads.
        data = self._file.read(size) if start + size <= self.size else b""
        if len(data) != size:
            raise _make_unreadable_error(
                str(self._path), f"was truncated while hil read it: expected {size} bytes at {start}"
            )
        return memoryview(data)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def load_file(path: Path, most: int = MAX_MODEL_BYTES) -> memoryview:
    """Read a whole regular file that other programs may change.

    Args:
        most: maximum number of bytes.

    Raises:
        UnreadableFile: see :func:`open_file`; or the file is larger, or was truncated during the read.
        OSError: see :func:`open_file`.
    """
    with FileReader(path) as reader:
        if reader.size > most:
            raise _make_unreadable_error(str(path), f"has {reader.size} bytes, at most {most} are allowed")
        return reader.read(0, reader.size)


def map_file(path: Path) -> memoryview:
    """Map a regular file into memory, read-only. For an empty file, return an empty view.

    Map only files that no other program changes, or in a process whose death hil reports: see :class:`FileReader`.

    Raises:
        UnreadableFile, OSError: see :func:`open_file`.
    """
    with open_file(path) as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def copy_file(source: str | Path, target: Path) -> Path:
    """Copy a regular file over another, and return the copy's path.

    Raises:
        UnreadableFile, OSError: see :func:`open_file`; or the target cannot be written.
    """
    open_file(Path(source)).close()  # raises for a device, which shutil would copy without end
    shutil.copyfile(source, target)
    return target


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. On success it replaces ``path``; on failure it is removed.

    If ``path`` is not a regular file (``/dev/null``, a pipe), yield ``path``, which must not be replaced.

    Raises:
        OSError: the file cannot be replaced.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    # Truncate the name, because the full name plus a suffix may exceed the file system's limit.
    temporary = path.with_name(f".{path.name[:40]}.{secrets.token_hex(4)}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: str | bytes, *, mode: int = 0o666) -> None:
    """Write a file atomically: readers see either the old or the complete new content.

    Args:
        data: bytes, or text to encode as UTF-8. Lone surrogates are written as escapes.
        mode: permissions of the new file, before the umask. The mode also applies while the file is written.

    Raises:
        OSError: the file cannot be written.
    """
    content = data if isinstance(data, bytes) else data.encode("utf-8", "backslashreplace")
    with replace_file(path) as temporary:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if temporary != path else 0)
        with os.fdopen(os.open(temporary, flags, mode), "wb") as file:
            file.write(content)


def resolve_within(folder: Path, path: Path) -> Path:
    """Return the path if it is inside the directory after resolving links.

    Raises:
        UsageError: a link leads outside the directory or is circular, or the path is invalid.
    """
    try:
        if path.resolve().is_relative_to(folder.resolve()):
            return path
    except ValueError as error:
        raise _make_invalid_error(path, error) from error
    except (OSError, RuntimeError) as error:  # circular links
        raise UsageError(f"cannot resolve the links in path {path}: {error}") from error
    raise UsageError(f"{path} points outside {folder}", hint="links in this directory must stay inside it")


def _read_mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except ValueError as error:
        raise _make_invalid_error(path, error) from error


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise _make_unreadable_error(str(path), f"is {kind}, not a regular file")


def _make_invalid_error(path: Path, error: ValueError) -> UnreadableFile:
    # A null byte or a lone surrogate, which no file system allows.
    return _make_unreadable_error(repr(str(path)), f"is an invalid file name: {error}")


def _make_unreadable_error(path: str, reason: str) -> UnreadableFile:
    return UnreadableFile(f"{path} {reason}", reason=f"it {reason}")


def suggest_path(path: Path) -> str:
    """Return the start of a hint for a missing path, ``did you mean 'models/net.onnx'? ``; "" without similar names."""
    try:
        names = [one.name for one in itertools.islice(path.parent.iterdir(), _MAX_NAMES) if one.name != path.name]
    except (OSError, ValueError):
        return ""
    return did_you_mean(str(path), [str(path.parent / name) for name in sorted(names)]) if path.name else ""

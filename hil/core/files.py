"""Files that somebody named: only plain files are read, and what is written appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hil.errors import UsageError

# More than any text that people write: configurations, flag files, lists.
MAX_TEXT_BYTES = 16 << 20
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: Path) -> BinaryIO:
    """A plain file, opened to be read. A link to one is followed.

    Raises:
        UsageError: it is a folder, a pipe, a socket or a device, or can be no path at all.
        OSError: it is not there or cannot be read.
    """
    # A device must not even be opened: for some of them that is an action.
    _refuse_odd(path, _mode(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_odd(path, os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: Path, most: int | None = None) -> bytes:
    """The bytes of a plain file.

    Args:
        most: how many bytes it may have; None is any number.

    Raises:
        UsageError, OSError: as :func:`open_file` says; it has more bytes than it may have.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read() if most is None else file.read(most + 1)
        if most is not None and max(size, len(data)) > most:
            raise UsageError(f"{path} has {max(size, len(data))} bytes, {most} are allowed")
        return data


def read_text(path: Path) -> str:
    """The text of a plain file of at most :data:`MAX_TEXT_BYTES`.

    Raises:
        UsageError, OSError: as :func:`read_file` says.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_file(path, MAX_TEXT_BYTES).decode().replace("\r\n", "\n")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, which takes the other's place at the end and is removed if that fails.

    Something other than a plain file (``/dev/null``, a pipe) is yielded itself: nothing may take its place.

    Raises:
        OSError: it cannot be put there.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    # The whole name and more may be longer than a file system allows.
    temporary = path.with_name(f".{path.name[:40]}.{secrets.token_hex(4)}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: str | bytes, *, mode: int = 0o666) -> None:
    """Write a file so that whoever opens it finds the old one or the whole new one.

    Args:
        data: bytes, or text, which is written as UTF-8 with half a surrogate pair as its escape.
        mode: the new file's, less the umask; nobody whom it shuts out can read the file while it is written either.

    Raises:
        OSError: it cannot be written.
    """
    content = data if isinstance(data, bytes) else data.encode("utf-8", "backslashreplace")
    with replacing(path) as temporary:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if temporary != path else 0)
        with os.fdopen(os.open(temporary, flags, mode), "wb") as file:
            file.write(content)


def within(folder: Path, path: Path) -> Path:
    """A path that is in a folder, links followed. Raises UsageError: a link leads out of the folder, or in a circle."""
    try:
        if path.resolve().is_relative_to(folder.resolve()):
            return path
    except (OSError, RuntimeError) as error:  # a circle of links
        raise UsageError(f"{path} cannot be followed: {error}") from error
    raise UsageError(f"{path} leads out of {folder}", hint="a link in such a folder must stay inside it")


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except ValueError as error:  # a zero byte, or what no file name can hold
        raise UsageError(f"{str(path)!r} can be no file's name: {error}") from error


def _refuse_odd(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise UsageError(f"{path} cannot be read: it is {kind}, no plain file", hint="name a plain file")

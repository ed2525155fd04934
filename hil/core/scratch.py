"""Temporary directories that are removed even after a process was killed.

Each process of a user locks a separate directory below a shared base until it exits. The next process
removes the directories that are not locked.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISDIR

from hil.core.storage_errors import convert_os_errors

# Unix socket paths have at most 104 bytes, and ssh also creates sockets below the directory.
_MAX_FOR_SOCKETS_LENGTH = 40


class Scratch:
    """Temporary directory of this process, below a base that all processes of the user share."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._lock = threading.Lock()
        self._owner = 0
        self._place: Path | None = None
        self._held = -1

    def place(self) -> Path:
        """Return this process's directory. The first call removes the directories of dead processes. Raises OSError."""
        with self._lock:
            # A forked process needs a new directory. The process also needs a new directory if its directory was
            # removed.
            if self._place is None or self._owner != os.getpid() or not self._place.is_dir():
                self._owner, self._place = os.getpid(), self._make_folder()
                atexit.register(self._remove, self._owner, self._place)
            return self._place

    def _make_folder(self) -> Path:
        with contextlib.suppress(FileExistsError):  # a file or a dangling link
            self._base.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(self._base):
            # The name belongs to another user, so at least make the new directory private.
            return Path(tempfile.mkdtemp(prefix="hil-", dir=self._base.parent))
        with _hold_lock(self._base, fcntl.LOCK_EX):
            # While this process has the lock, an unlocked directory belongs to a dead process, not to a process that is
            # starting.
            dead = [found for found in self._base.iterdir() if _is_ours(found) and not _is_held(found)]
            made = Path(tempfile.mkdtemp(prefix="", dir=self._base))
            if self._held >= 0:
                os.close(self._held)
            self._held = _open(made)
            with contextlib.suppress(OSError):  # no lock support: directories of dead processes remain
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            graves = [found.rename(made / f"dead-{number}") for number, found in enumerate(dead)]
        for grave in graves:
            remove_tree(grave)
        return made

    def _remove(self, owner: int, place: Path) -> None:
        if os.getpid() == owner:
            remove_tree(place)


_shared: dict[Path, Scratch] = {}


def place(*, for_sockets: bool = False) -> Path:
    """Return this process's temporary directory. ``for_sockets`` selects a short path, even if TMPDIR is long."""
    with convert_storage_errors():
        return place_below(_get_temporary(for_sockets) / f"hil-{os.geteuid()}")


def make_lasting_folder(name: str) -> Path | None:
    """Return a user directory for sockets that outlive this process, creating it if missing.

    Return None if it cannot be created, or the name belongs to another user.
    """
    found = _get_temporary(for_sockets=True) / f"hil-{name}-{os.geteuid()}"
    with contextlib.suppress(OSError):
        found.mkdir(mode=0o700)
    return found if _is_ours(found) and not found.stat().st_mode & 0o077 else None


def _get_temporary(for_sockets: bool) -> Path:
    base = tempfile.gettempdir()
    return Path("/tmp" if for_sockets and len(os.fsencode(base)) > _MAX_FOR_SOCKETS_LENGTH else base)


def place_below(base: Path) -> Path:
    """Return this process's directory below a base, creating it if missing. Raises OSError if creation fails."""
    return _shared.setdefault(base, Scratch(base)).place()


def make_folder(prefix: str, *, for_sockets: bool = False) -> Path:
    """Create an empty private directory. If the caller does not remove it, a later process does.

    Raises:
        StorageError: the directory cannot be created.
    """
    at = place(for_sockets=for_sockets)
    with convert_storage_errors():
        return Path(tempfile.mkdtemp(prefix=prefix, dir=at))


@contextlib.contextmanager
def make_temporary_folder(prefix: str) -> Iterator[str]:
    """Yield an empty directory, removed at the end.

    Raises StorageError if the directory, or files in it, cannot be written.
    """
    at = place()
    with convert_storage_errors():
        made = tempfile.TemporaryDirectory(prefix=prefix, dir=at, ignore_cleanup_errors=True)
    with convert_storage_errors(at), made as path:
        yield path


def remove_tree(top: Path) -> None:
    """Remove a directory tree as far as possible, at any depth and without following links.

    A program may have created a tree that is too deep for Python's functions or for the maximum path length.
    """
    with contextlib.suppress(OSError):
        if not top.is_symlink():
            top.chmod(0o700)  # the creator may have removed the permissions
        at = _open(top)
        # For each directory on the way down: name, identity of the parent, and the parent's remaining directories.
        way: list[tuple[str, tuple[int, int], list[str]]] = []
        try:
            waiting = _empty_folder(at)
            while waiting or way:
                if waiting:
                    name, here = waiting.pop(), os.fstat(at)
                    with contextlib.suppress(OSError):
                        below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
                        way.append((name, (here.st_dev, here.st_ino), waiting))
                        os.close(at)
                        at, waiting = below, _empty_folder(below)
                    continue
                name, parent, waiting = way.pop()
                above = os.open("..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=at)
                os.close(at)
                at = above
                there = os.fstat(at)
                if (there.st_dev, there.st_ino) != parent:
                    return  # moved by another process
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=at)
        finally:
            os.close(at)
        top.rmdir()


def _empty_folder(found: int) -> list[str]:
    """Remove a directory's files and return the names of its subdirectories."""
    folders = []
    for name in os.listdir(found):
        with contextlib.suppress(OSError):
            if S_ISDIR(os.stat(name, dir_fd=found, follow_symlinks=False).st_mode):
                os.chmod(name, 0o700, dir_fd=found)
                folders.append(name)
            else:
                os.unlink(name, dir_fd=found)
    return folders


def convert_storage_errors(only_below: Path | None = None) -> contextlib.AbstractContextManager[None]:
    """Raise StorageError if the temporary directory fails. ``only_below`` is as in :func:`convert_os_errors`."""
    text = f"cannot write to {only_below or _get_temporary_name()} on this machine"
    return convert_os_errors(
        text, "free disk space, or set TMPDIR to a directory on a different disk", only_below=only_below
    )


def _get_temporary_name() -> str:
    with contextlib.suppress(OSError):  # no writable directory
        return tempfile.gettempdir()
    return "a temporary directory"


def _is_ours(found: Path) -> bool:
    """Return True for a directory, not a link, that this user owns."""
    try:
        stat = found.lstat()
    except OSError:
        return False
    return S_ISDIR(stat.st_mode) and stat.st_uid == os.geteuid()


def _open(found: Path) -> int:
    return os.open(found, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _is_held(found: Path) -> bool:
    """Return True if the directory's process is alive, or may be alive."""
    try:
        with _hold_lock(found, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return False
    except OSError:
        return True


@contextlib.contextmanager
def _hold_lock(found: Path, how: int) -> Iterator[None]:
    number = _open(found)
    try:
        fcntl.flock(number, how)
        yield
    finally:
        os.close(number)

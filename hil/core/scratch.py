"""Temporary folders that outlive nobody: what a killed process leaves, the next one removes.

All of a user's processes have theirs below one folder, each in a folder of its own on which it holds a lock for as long
as it lives. Whoever comes next removes the folders whose lock nobody holds.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISDIR

from hil.errors import StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# Unix sockets have paths of at most 104 bytes, and ssh makes some of its own.
_LONGEST_FOR_SOCKETS = 40


class Scratch:
    """Folders of this process below one that all processes of the user share."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._lock = threading.Lock()
        self._owner = 0
        self._place: Path | None = None
        self._held = -1

    def place(self) -> Path:
        """This process's own folder until it ends; the first call removes those of the dead. Raises StorageError."""
        with self._lock, storage(self._base):
            # A fork is a process of its own; a folder that was removed behind our back is made anew.
            if self._place is None or self._owner != os.getpid() or not self._place.is_dir():
                self._owner, self._place = os.getpid(), self._made()
                atexit.register(self._remove, self._owner, self._place)
            return self._place

    def _made(self) -> Path:
        with contextlib.suppress(FileExistsError):  # a file or a link to nothing: no folder of ours
            self._base.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(self._base):
            # Somebody else took the name: then at least nobody sees into what we make.
            return Path(tempfile.mkdtemp(prefix="hil-", dir=self._base.parent))
        with _locked(self._base, fcntl.LOCK_EX):
            # Under the lock every folder that is not locked is a dead one's, and not one that is being made.
            dead = [found for found in self._base.iterdir() if _is_ours(found) and not _is_held(found)]
            made = Path(tempfile.mkdtemp(prefix="", dir=self._base))
            if self._held >= 0:
                os.close(self._held)
            self._held = _open(made)
            with contextlib.suppress(OSError):  # a file system without locks: there the dead's stay
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
    """The folder of this process below the system's temporary one; ``for_sockets``: of a short path despite TMPDIR."""
    return place_below(_temporary(for_sockets) / f"hil-{os.geteuid()}")


def lasting_folder(name: str) -> Path | None:
    """A folder of the user's for sockets that outlive this process, made where it is not there.

    None where it cannot be made, or somebody else took its name.
    """
    found = _temporary(for_sockets=True) / f"hil-{name}-{os.geteuid()}"
    with contextlib.suppress(OSError):
        found.mkdir(mode=0o700)
    return found if _is_ours(found) and not found.stat().st_mode & 0o077 else None


def _temporary(for_sockets: bool) -> Path:
    base = tempfile.gettempdir()
    return Path("/tmp" if for_sockets and len(os.fsencode(base)) > _LONGEST_FOR_SOCKETS else base)


def place_below(base: Path) -> Path:
    """The folder of this process below another one, made for such folders. Raises StorageError: it cannot be made."""
    return _shared.setdefault(base, Scratch(base)).place()


def new_folder(prefix: str, *, for_sockets: bool = False) -> Path:
    """A new empty folder for nobody else to see, which its maker removes, or whoever comes after him.

    Raises:
        StorageError: there is no room for it.
    """
    at = place(for_sockets=for_sockets)
    with storage(at):
        return Path(tempfile.mkdtemp(prefix=prefix, dir=at))


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[str]:
    """A new empty folder, removed at the end. Raises StorageError: no room for it, or for what is written meanwhile."""
    at = place()
    with storage(at), tempfile.TemporaryDirectory(prefix=prefix, dir=at, ignore_cleanup_errors=True) as made_here:
        yield made_here


def remove_tree(top: Path) -> None:
    """Remove a folder, as far as that can be: however deep it is, and following no link.

    What a program left may be deeper than Python's own functions can go, and than a path can tell.
    """
    with contextlib.suppress(OSError):
        if not top.is_symlink():
            top.chmod(0o700)  # who wrote into it may have closed it
        at = _open(top)
        # Of each folder on the way down: its name, its parent's identity, and the folders in the parent still to go.
        way: list[tuple[str, tuple[int, int], list[str]]] = []
        try:
            waiting = _emptied(at)
            while waiting or way:
                if waiting:
                    name, here = waiting.pop(), os.fstat(at)
                    with contextlib.suppress(OSError):
                        below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
                        way.append((name, (here.st_dev, here.st_ino), waiting))
                        os.close(at)
                        at, waiting = below, _emptied(below)
                    continue
                name, parent, waiting = way.pop()
                above = os.open("..", os.O_RDONLY | os.O_DIRECTORY, dir_fd=at)
                os.close(at)
                at = above
                there = os.fstat(at)
                if (there.st_dev, there.st_ino) != parent:
                    return  # somebody moved it meanwhile
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=at)
        finally:
            os.close(at)
        top.rmdir()


def _emptied(found: int) -> list[str]:
    """Remove a folder's files; returns the names of its folders."""
    folders = []
    for name in os.listdir(found):
        with contextlib.suppress(OSError):
            if S_ISDIR(os.stat(name, dir_fd=found, follow_symlinks=False).st_mode):
                os.chmod(name, 0o700, dir_fd=found)
                folders.append(name)
            else:
                os.unlink(name, dir_fd=found)
    return folders


@contextlib.contextmanager
def storage(where: Path) -> Iterator[None]:
    """A disk that is full, or that cannot be written, is told as that. Raises StorageError: it is."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise StorageError(
            f"cannot write to {error.filename or where}: {error.strerror}",
            hint="make room there, or set TMPDIR to a folder on another disk",
        ) from error


def _is_ours(found: Path) -> bool:
    """Whether it is a folder, no link to one, that belongs to this user."""
    try:
        stat = found.lstat()
    except OSError:
        return False
    return S_ISDIR(stat.st_mode) and stat.st_uid == os.geteuid()


def _open(found: Path) -> int:
    return os.open(found, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _is_held(found: Path) -> bool:
    """Whether the process that made the folder lives, as far as can be known."""
    try:
        with _locked(found, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return False
    except OSError:
        return True


@contextlib.contextmanager
def _locked(found: Path, how: int) -> Iterator[None]:
    number = _open(found)
    try:
        fcntl.flock(number, how)
        yield
    finally:
        os.close(number)

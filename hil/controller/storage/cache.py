"""The content-addressed cache of what can be made again: compiled programs, imports, reference results.

An entry is a folder of files and a ``meta.json`` with their sizes and digests, under a key made of everything that its
content depends on. It appears whole or not at all; a damaged one is thrown away and made again. What a :class:`Cache`
has given out or made, nobody else's cleaning takes away while that object lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.core import scratch
from hil.core.digest import digest_file, digest_of
from hil.errors import StorageError

if TYPE_CHECKING:
    import filelock

META = "meta.json"
_VALUE = "value.json"
_KEY = re.compile(r"[a-z][a-z0-9_-]*-[0-9a-f]{64}")
# Files up to this size are checked by digest at every use (1 ms at BLAKE3's speed); larger ones where they do not look
# as they did when they were made.
_DIGEST_UP_TO = 4 << 20
_NO_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}


@dataclass(frozen=True)
class Entry:
    """One entry: what it is, how large (bytes), and when it was last used (seconds since the epoch)."""

    key: str
    path: Path
    size: int
    last_used: float
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What sort of thing it holds: the first part of its key."""
        return self.key.rsplit("-", 1)[0]


class Cache:
    """Folders of files by key, safe to use from many threads and processes.

    Args:
        root: where; None is ``$HIL_CACHE_DIR`` or else the user's cache folder. It is made when first written to.

    Attributes:
        shared: a program's key -> that of an entry which holds it among others. Who compiles many together puts it
            here, so that only users of this very object are given such a program.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.shared: dict[str, str] = {}
        self.root = root or default_root()
        self._uses = Uses(self.root)
        self._recomputed: set[str] = set()
        self._private: dict[str, Path] = {}

    @staticmethod
    def key(kind: str, **parts: Any) -> str:
        """The key for content that depends on these parts (anything JSON can say) and nothing else."""
        text = json.dumps({"kind": kind, **parts}, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return _checked(f"{kind}-{digest_of(text.encode()).split(':')[1]}")

    def get(self, key: str) -> Path | None:
        """The folder of an intact entry, and note its use; None where there is none or it is damaged."""
        path = self._private.get(key) or self._path(key)
        if not path.exists():
            return None
        # First said, then looked at: see gc.
        self._uses.add(key)
        if not _is_intact(path):
            return None
        with contextlib.suppress(OSError):
            os.utime(path / META)
        return path

    def put(self, key: str, meta: Mapping[str, Any], fill: Callable[[Path], None]) -> Path:
        """Make an entry: ``fill`` writes files into an empty folder, which then takes the place of any older entry.

        An intact entry that others use stays, because compilers do not write the same bytes twice. What was made then
        belongs to this object alone, in a folder that stays until the process ends.
        """
        path = self._path(key)
        self._uses.add(key)
        with self._storage():
            temporary = self.making() / secrets.token_hex(16)
            temporary.mkdir()
            try:
                fill(temporary)
                content = {
                    file.relative_to(temporary).as_posix(): {"digest": digest_file(file), **_look(file)}
                    for file in sorted(temporary.rglob("*"))
                    if file.is_file()
                }
                document = {"key": key, "made": time.time(), "meta": dict(meta), "files": content}
                (temporary / META).write_text(json.dumps(document, indent=1))
                path.parent.mkdir(parents=True, exist_ok=True)
                is_intact = _is_intact(path)  # before the gate: it may take long
                with self._uses.nobody_new() as in_use:
                    if is_intact and key in in_use:
                        self._private[key] = temporary
                        return temporary
                    older = self._buried(path)
                    temporary.rename(path)
                self._private.pop(key, None)
            finally:
                if self._private.get(key) != temporary:
                    shutil.rmtree(temporary, ignore_errors=True)
            if older is not None:
                shutil.rmtree(older, ignore_errors=True)
        return path

    def get_or_make(
        self, key: str, meta: Mapping[str, Any], make: Callable[[Path], None], recompute: bool = False
    ) -> tuple[Path, bool]:
        """The entry's folder, made if need be, and whether it was there already.

        Two processes that want the same entry make it once: the second waits for the first. What ``make`` raises
        goes through, and nothing is kept.

        Args:
            recompute: make it even though it is there; once for all who ask this object to.

        Raises:
            StorageError: the cache's folder is full or cannot be written.
        """

        def found() -> Path | None:
            return None if recompute and key not in self._recomputed else self.get(key)

        if path := found():
            return path, True
        with self.lock(key):
            if path := found():
                return path, True
            path = self.put(key, meta, make)
            if recompute:
                self._recomputed.add(key)
            return path, False

    def get_or_compute(
        self, key: str, meta: Mapping[str, Any], compute: Callable[[], Any], recompute: bool = False
    ) -> tuple[Any, bool]:
        """A value that JSON can say, computed if need be, and whether it was there already: see :meth:`get_or_make`."""

        def make(folder: Path) -> None:
            (folder / _VALUE).write_text(json.dumps(compute()))

        entry, cached = self.get_or_make(key, meta, make, recompute)
        return json.loads((entry / _VALUE).read_bytes()), cached

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold an entry: nobody else makes or evicts it meanwhile. Not to be taken twice."""
        with self._storage():
            lock = self._lock_file(key)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _lock_file(self, key: str) -> filelock.BaseFileLock:
        import filelock

        folder = self.root / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        return filelock.FileLock(folder / f"{_checked(key)}.lock")

    def ls(self) -> list[Entry]:
        """Every entry, the one used last first."""
        entries = []
        for meta_path in self.root.glob("*/*/" + META):
            key = f"{meta_path.parent.parent.name}-{meta_path.parent.name}"
            if not _KEY.fullmatch(key):
                continue
            with contextlib.suppress(OSError, ValueError, KeyError):
                document = json.loads(meta_path.read_text())
                stat = meta_path.stat()
                size = stat.st_size + sum(item["size"] for item in document["files"].values())
                entries.append(Entry(key, meta_path.parent, size, stat.st_mtime, document["meta"]))
        return sorted(entries, key=lambda entry: -entry.last_used)

    def gc(self, max_bytes: int | None = None, max_age: float | None = None) -> list[Entry]:
        """Evict entries unused for ``max_age`` seconds, then the least recently used until ``max_bytes`` are left.

        An entry that somebody is making (:meth:`lock`), or that another user has in use (:meth:`in_use`), stays. Raises
        StorageError: the cache's folder cannot be written.
        """
        import filelock

        now = time.time()
        kept = 0
        evicted = []
        with self._storage():
            in_use = self.in_use()
            for entry in self.ls():
                too_old = max_age is not None and now - entry.last_used > max_age
                too_much = max_bytes is not None and kept + entry.size > max_bytes
                gone = False
                if (too_old or too_much) and entry.key not in in_use:
                    lock = self._lock_file(entry.key)
                    with contextlib.suppress(filelock.Timeout), lock.acquire(timeout=0):
                        gone = self._evict(entry)
                        # Unlinked while held: at worst two processes then make the same entry at once.
                        Path(lock.lock_file).unlink(missing_ok=True)
                if gone:
                    evicted.append(entry)
                else:
                    kept += entry.size
            self.making()
        return evicted

    def making(self) -> Path:
        """This process's own folder on the cache's file system, for what is being made or removed."""
        return scratch.place_below(self.root / f"making-{os.geteuid()}")

    def _path(self, key: str) -> Path:
        kind, _, name = _checked(key).rpartition("-")
        return self.root / kind / name

    def in_use(self) -> set[str]:
        """The keys of what other users of the cache, in this process or another, were given and may still read."""
        return self._uses.of_others()

    def _evict(self, entry: Entry) -> bool:
        """Remove an entry whose lock is held; false where somebody was given it at the last moment."""
        # Who uses an entry says so before he looks whether it is there: said by now, or he will not find it.
        with self._uses.nobody_new() as in_use:
            if entry.key in in_use:
                return False
            grave = self._buried(entry.path)
        if grave is not None:
            shutil.rmtree(grave, ignore_errors=True)
        return grave is not None

    def _buried(self, path: Path) -> Path | None:
        """An entry, renamed away so that nobody sees half of it while it is removed; None where there is none."""
        with contextlib.suppress(FileNotFoundError):
            return path.rename(self.making() / secrets.token_hex(16))
        return None

    @contextlib.contextmanager
    def _storage(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_STORAGE:
                raise
            raise StorageError(
                f"cannot write to the cache {self.root}: {error.strerror}",
                hint="make room with `hil cache gc`, or set HIL_CACHE_DIR to a folder that can be written",
            ) from error


def digests_in(entry: Path) -> dict[str, str]:
    """The files of an entry (from :meth:`Cache.get_or_make`) and their digests."""
    files = json.loads((entry / META).read_bytes())["files"]
    return {name: item["digest"] for name, item in files.items()}


def default_root() -> Path:
    """``$HIL_CACHE_DIR``, or else the user's cache folder."""
    if chosen := os.environ.get("HIL_CACHE_DIR"):
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("hil", appauthor=False))


def _checked(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError(f"not a cache key: {key!r}")
    return key


def _is_intact(path: Path) -> bool:
    try:
        files = json.loads((path / META).read_bytes())["files"]
        return all(_is_as_written(path / name, expected) for name, expected in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _is_as_written(file: Path, written: Mapping[str, Any]) -> bool:
    look = _look(file)
    if look["size"] > _DIGEST_UP_TO and all(written.get(name) == value for name, value in look.items()):
        return True
    return bool(look["size"] == written["size"] and digest_file(file) == written["digest"])


def _look(file: Path) -> dict[str, int]:
    """What tells whether a file was altered; ``changed_ns`` is a time that nobody can set."""
    stat = file.stat()
    return {"size": stat.st_size, "inode": stat.st_ino, "changed_ns": stat.st_ctime_ns}


class Uses:
    """The keys that one user of a cache has in use, in a file that is locked for as long as he lives.

    The system takes the lock away when a process ends, however it ends: a file without one is a leftover.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root / "users"
        self._gate = root / "users.lock"
        self._name = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._keys: set[str] = set()
        self._file: int | None = None

    def add(self, key: str) -> None:
        """Have a key in use from now on. Where the cache cannot be written, nobody is told."""
        with self._lock, contextlib.suppress(OSError):
            if key not in self._keys:
                self._file = self._open() if self._file is None else self._file
                with self._through_gate(fcntl.LOCK_SH):
                    os.write(self._file, f"{key}\n".encode())
                self._keys.add(key)

    @contextlib.contextmanager
    def nobody_new(self) -> Iterator[set[str]]:
        """What others have in use (:meth:`of_others`), to which nobody adds until this is left."""
        with self._through_gate(fcntl.LOCK_EX):
            yield self.of_others()

    def of_others(self) -> set[str]:
        """The keys that others have in use; what dead ones left behind is removed."""
        found: set[str] = set()
        for path in self._folder.glob("[0-9a-f]*"):
            if path.name != self._name:
                with contextlib.suppress(FileNotFoundError), path.open() as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        found.update(file.read().split())
                    else:
                        path.unlink()
        return found

    @contextlib.contextmanager
    def _through_gate(self, how: int) -> Iterator[None]:
        # Locking needs no right to write: another user may have made the file.
        try:
            file = os.open(self._gate, os.O_RDONLY)
        except FileNotFoundError:
            file = os.open(self._gate, os.O_RDONLY | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, how)
            yield
        finally:
            os.close(file)

    def _open(self) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        # It gets the name that others look at when it is locked: unlocked it would be a leftover to them.
        made = self._folder / f".{self._name}"
        file = os.open(made, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        fcntl.flock(file, fcntl.LOCK_EX)
        path = made.rename(self._folder / self._name)
        weakref.finalize(self, _leave, file, path)
        return file


def _leave(file: int, path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
    with contextlib.suppress(OSError):
        os.close(file)

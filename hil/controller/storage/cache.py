"""Content-addressed cache of reproducible files: compiled programs, imports, reference results.

An entry is a directory of files with a ``meta.json`` that contains their sizes and digests. Its key is a digest of all
inputs that determine the content. Entries are created atomically. hil deletes a corrupt entry and creates it again.
While a :class:`Cache` object exists, garbage collection by other processes does not delete the entries that the object
returned.
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
import stat
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.core import scratch
from hil.core.bounded_json import read_json
from hil.core.cancellation import LOOK_SECONDS, check_cancelled
from hil.core.digest import digest_of
from hil.core.files import digest_file, open_file, read_file
from hil.core.storage_errors import convert_os_errors
from hil.errors import UnreadableFile

if TYPE_CHECKING:
    import filelock

META = "meta.json"
_VALUE = "value.json"
_KEY = re.compile(r"[a-z][a-z0-9_-]*-[0-9a-f]{64}")
# hil verifies files up to this size by digest at each use (1 ms at BLAKE3's speed). hil verifies larger files only if
# their size, inode or change time differs.
_DIGEST_UP_TO = 4 << 20


@dataclass(frozen=True)
class Entry:
    """Cache entry with the size in bytes and the time of the last use in seconds since the epoch."""

    key: str
    path: Path
    size: int
    last_used: float
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Kind of content: the first part of the key."""
        return self.key.rsplit("-", 1)[0]


class Cache:
    """Directories of files by key. Safe for use from many threads and processes.

    Args:
        root: Cache directory; None is ``$HIL_CACHE_DIR``, or else the user's cache directory. The directory is created
            at the first write.

    Attributes:
        shared: Key of a program -> key of an entry with multiple programs that were compiled together. The compiling
            code fills this dict, so that only users of this object get such a program.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.shared: dict[str, str] = {}
        self.root = root or choose_default_root()
        self._uses = Uses(self.root)
        self._recomputed: set[str] = set()
        self._private: dict[str, Path] = {}

    @staticmethod
    def key(kind: str, **parts: Any) -> str:
        """Return the key for content that depends only on these parts, which must be JSON values."""
        text = json.dumps({"kind": kind, **parts}, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return _check_key(f"{kind}-{digest_of(text.encode()).split(':')[1]}")

    def get(self, key: str) -> Path | None:
        """Return the directory of an intact entry and record the use. Returns None if it is missing or corrupt."""
        path = self._private.get(key) or self._get_path(key)
        with self._convert_errors():
            if not path.exists():
                return None
        # Register the use before checking the entry. Otherwise, _evict could delete the entry in between.
        self._uses.add(key)
        if not _is_intact(path):
            return None
        with contextlib.suppress(OSError):
            os.utime(path / META)
        return path

    def put(self, key: str, meta: Mapping[str, Any], fill: Callable[[Path], None]) -> Path:
        """Create an entry. ``fill`` writes files to an empty directory, which replaces an existing entry.

        An intact entry that others use is not replaced, because compilers may write different bytes each time. In this
        case, only this object uses the new files. Their directory is deleted when the process ends.
        """
        path = self._get_path(key)
        self._uses.add(key)
        with self._convert_errors():
            temporary = self.making() / secrets.token_hex(16)
            temporary.mkdir()
        try:
            with self._convert_errors(temporary):
                fill(temporary)
            with self._convert_errors():
                content = {
                    file.relative_to(temporary).as_posix(): {"digest": digest_file(file), **_read_stamp(file)}
                    for file in sorted(temporary.rglob("*"))
                    if file.is_file()
                }
                document = {"key": key, "made": time.time(), "meta": dict(meta), "files": content}
                (temporary / META).write_text(json.dumps(document, indent=1))
                path.parent.mkdir(parents=True, exist_ok=True)
                is_intact = _is_intact(path)  # check before locking, because the check may take long
                with self._uses.block_new_users() as in_use:
                    if is_intact and key in in_use:
                        self._private[key] = temporary
                        return temporary
                    older = self._rename_away(path)
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
        """Return the entry's directory, created if necessary, and True if the entry existed.

        If two processes request the same entry, the second waits for the first. Errors of ``make`` are propagated, and
        nothing is stored.

        Args:
            recompute: Create the entry even if it exists, once for all calls on this object.

        Raises:
            StorageError: the cache directory is full or not writable.
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
        """Return a JSON value, computed if necessary, and True if it was cached: see :meth:`get_or_make`."""

        def make(folder: Path) -> None:
            (folder / _VALUE).write_text(json.dumps(compute()))

        entry, cached = self.get_or_make(key, meta, make, recompute)
        return json.loads(read_file(entry / _VALUE)), cached

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Lock an entry, so that no other user creates or evicts it. Not reentrant."""
        import filelock

        with self._convert_errors():
            lock = self._lock_file(key)
            while not lock.is_locked:
                check_cancelled()
                with contextlib.suppress(filelock.Timeout):
                    lock.acquire(timeout=LOOK_SECONDS)
        try:
            yield
        finally:
            lock.release()

    def _lock_file(self, key: str) -> filelock.BaseFileLock:
        import filelock

        folder = self.root / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        return filelock.FileLock(folder / f"{_check_key(key)}.lock")

    def ls(self, kinds: Collection[str] = ()) -> list[Entry]:
        """Return all entries, or only the entries of some kinds, most recently used first."""
        entries = []
        with self._convert_errors():
            found = [path for kind in kinds or ("*",) for path in self.root.glob(f"{kind}/*/{META}")]
        for meta_path in found:
            key = f"{meta_path.parent.parent.name}-{meta_path.parent.name}"
            if not _KEY.fullmatch(key):
                continue
            with contextlib.suppress(OSError, ValueError):
                meta, files = _read_meta(meta_path)
                status = meta_path.stat()
                size = status.st_size + sum(item["size"] for item in files.values())
                entries.append(Entry(key, meta_path.parent, size, status.st_mtime, meta))
        return sorted(entries, key=lambda entry: -entry.last_used)

    def gc(
        self, max_bytes: int | None = None, max_age: float | None = None, kinds: Collection[str] = ()
    ) -> list[Entry]:
        """Evict entries that were unused for ``max_age`` seconds, then the least recently used above ``max_bytes``.

        Entries that are being created (:meth:`lock`) or are in use by others (:meth:`list_in_use`) are not evicted.

        Args:
            kinds: Kinds of entries to consider; all by default.

        Raises:
            StorageError: the cache directory is not writable.
        """
        import filelock

        now = time.time()
        kept = 0
        evicted = []
        with self._convert_errors():
            in_use = self.list_in_use()
            for entry in self.ls(kinds):
                too_old = max_age is not None and now - entry.last_used > max_age
                too_much = max_bytes is not None and kept + entry.size > max_bytes
                gone = False
                if (too_old or too_much) and entry.key not in in_use:
                    lock = self._lock_file(entry.key)
                    with contextlib.suppress(filelock.Timeout), lock.acquire(timeout=0):
                        gone = self._evict(entry)
                        # Delete the file while it is locked. At worst, two processes then create the same entry
                        # concurrently.
                        Path(lock.lock_file).unlink(missing_ok=True)
                if gone:
                    evicted.append(entry)
                else:
                    kept += entry.size
            self.making()
        return evicted

    def making(self) -> Path:
        """Return this process's directory on the cache's file system, for entries being created or removed.

        Raises:
            StorageError: the directory cannot be created.
        """
        with self._convert_errors():
            return scratch.place_below(self.root / f"making-{os.geteuid()}")

    def _get_path(self, key: str) -> Path:
        kind, _, name = _check_key(key).rpartition("-")
        return self.root / kind / name

    def list_in_use(self) -> set[str]:
        """Return the keys of entries that other users of the cache may still read, in this or other processes."""
        with self._convert_errors():
            return self._uses.list_others()

    def _evict(self, entry: Entry) -> bool:
        """Remove a locked entry. Returns False if another user requested the entry in the meantime."""
        # Users register a use before they check that the entry exists. So each user is either registered now, or will
        # not find the entry.
        with self._uses.block_new_users() as in_use:
            if entry.key in in_use:
                return False
            grave = self._rename_away(entry.path)
        if grave is not None:
            shutil.rmtree(grave, ignore_errors=True)
        return grave is not None

    def _rename_away(self, path: Path) -> Path | None:
        """Rename an entry away, so that no user sees a partly deleted entry. Returns None if it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            return path.rename(self.making() / secrets.token_hex(16))
        return None

    def _convert_errors(self, only_below: Path | None = None) -> contextlib.AbstractContextManager[None]:
        """Convert errors in the cache directory to StorageError: see :func:`convert_os_errors`."""
        hint = "free disk space with `hil cache gc`, or set HIL_CACHE_DIR to a writable directory"
        return convert_os_errors(f"cannot write to the cache {self.root}", hint, only_below=only_below)


def read_digests(entry: Path) -> dict[str, str]:
    """Return the files of an entry (from :meth:`Cache.get_or_make`) with their digests."""
    _, files = _read_meta(entry / META)
    return {name: item["digest"] for name, item in files.items()}


def choose_default_root() -> Path:
    """Return ``$HIL_CACHE_DIR``, or else the user's cache directory."""
    if chosen := os.environ.get("HIL_CACHE_DIR"):
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("hil", appauthor=False))


def _check_key(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError(f"invalid cache key {key!r}")
    return key


def _read_meta(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Read an entry's meta.json: the description, and the attributes of each file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged.
    """
    document = read_json(path)
    meta, files = (document.get("meta"), document.get("files")) if isinstance(document, dict) else (None, None)
    if not isinstance(meta, dict) or not isinstance(files, dict) or not all(map(_is_file_record, files.values())):
        raise ValueError(f"{path} is damaged")
    return meta, files


def _is_file_record(item: Any) -> bool:
    if not isinstance(item, dict) or not isinstance(item.get("digest"), str):
        return False
    size = item.get("size")
    return type(size) is int and size >= 0


def _is_intact(path: Path) -> bool:
    try:
        _, files = _read_meta(path / META)
        return all(_is_as_written(path / name, expected) for name, expected in files.items())
    except (OSError, ValueError):
        return False


def _is_as_written(file: Path, written: Mapping[str, Any]) -> bool:
    look = _read_stamp(file)
    if look["size"] > _DIGEST_UP_TO and all(written.get(name) == value for name, value in look.items()):
        return True
    return bool(look["size"] == written["size"] and digest_file(file) == written["digest"])


def _read_stamp(file: Path) -> dict[str, int]:
    """Return the file attributes that show a change of the content. Users cannot set the time ``changed_ns``."""
    status = file.stat()
    return {"size": status.st_size, "inode": status.st_ino, "changed_ns": status.st_ctime_ns}


class Uses:
    """Keys of the entries that a user, a :class:`Cache` object, has in use.

    The user keeps the file with these keys locked. The system releases the lock when the process ends for any reason.
    So a file without a lock is stale.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root / "users"
        self._gate = root / "users.lock"
        self._name = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._keys: set[str] = set()
        self._file: int | None = None

    def add(self, key: str) -> None:
        """Register a key as used. In a read-only cache, this has no effect, so other users may delete the entry."""
        with self._lock, contextlib.suppress(OSError):
            if key not in self._keys:
                self._file = self._open() if self._file is None else self._file
                with self._lock_gate(fcntl.LOCK_SH):
                    os.write(self._file, f"{key}\n".encode())
                self._keys.add(key)

    @contextlib.contextmanager
    def block_new_users(self) -> Iterator[set[str]]:
        """Yield the keys in use by others (:meth:`list_others`). Block new registrations inside the context."""
        with self._lock_gate(fcntl.LOCK_EX):
            yield self.list_others()

    def list_others(self) -> set[str]:
        """Return the keys in use by others, and remove stale files."""
        found: set[str] = set()
        for path in self._folder.glob("[0-9a-f]*"):
            if path.name != self._name:
                # Skip other kinds of files: hil did not create them.
                with contextlib.suppress(FileNotFoundError, UnreadableFile), open_file(path) as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        found.update(file.read().decode().split())
                    else:
                        path.unlink()
        return found

    @contextlib.contextmanager
    def _lock_gate(self, how: int) -> Iterator[None]:
        # Open the file read-only, which is sufficient for a lock: the file may belong to a different user. Do not
        # block, because opening a named pipe would wait for a writer.
        flags = os.O_RDONLY | os.O_NONBLOCK
        try:
            file = os.open(self._gate, flags)
        except FileNotFoundError:
            file = os.open(self._gate, flags | os.O_CREAT, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, f"{self._gate.name} is not a regular file", str(self._gate))
            fcntl.flock(file, how)
            yield
        finally:
            os.close(file)

    def _open(self) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        # Rename the file only after locking it: other users would treat an unlocked file as stale.
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

"""Content-addressed blob store in one directory. Writes are atomic, verified and resumable, with LRU eviction.

One agent at a time may use the directory: see :mod:`hil.agent.store_lock`. A blob's path is derived only from its
digest, which is validated first, so a request cannot name a file outside the directory.

A program on this board has the agent's write permissions and may change a blob at any time. Before each use, the store
compares the file's metadata with the metadata at the last digest check. After any change, the store verifies the digest
again.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple, TypeVar

from hil.core import digest as digests
from hil.core.digest import OrderedExecutor, StreamHasher
from hil.core.disk_faults import FAULTS, FULL, make_disk_error
from hil.core.files import copy_file, digest_file
from hil.core.scratch import remove_tree
from hil.errors import BlobDamaged, BoardUnfit, LoadFailed, UsageError

T = TypeVar("T")

_HASH_PIECE = 1 << 20
# Maximum age and number of interrupted uploads. Clients resume an upload soon or never.
_PARTIAL_KEPT_SECONDS = 24 * 3600.0
_PARTIALS_KEPT = 16
# Maximum directory depth of a program's file.
_MAX_PARTS = 16
# File timestamps have a resolution of a few milliseconds: two changes within one tick are indistinguishable.
_TICK_NS = 100_000_000
# Reserved for the agent's log and journal: without space for them, an agent cannot start and cannot evict blobs.
_RESERVED_BYTES = 4 << 20
# Time for a broken connection to release an upload before a new connection resumes it.
_SETTLES_SECONDS = 5.0


@dataclass(frozen=True)
class Quota:
    """Size of blobs and uploads above which the store evicts the least recently used.

    A share only controls eviction: blobs in use may fill the disk. A number of bytes is a hard limit.
    """

    share: float = 0.5  # of the free disk space plus the store's current size
    bytes: int | None = None  # replaces the share; 0 means unlimited

    @classmethod
    def parse(cls, text: str) -> Quota:
        """Parse ``BYTES`` or ``SHARE%``. Raises ValueError otherwise."""
        if not text.endswith("%"):
            found = cls(bytes=int(text))
            is_valid = int(text) >= 0
        else:
            found = cls(share=float(text[:-1]) / 100)
            is_valid = 0 < found.share <= 1
        if not is_valid:
            raise ValueError(text)
        return found

    def limit(self, held: int, free: int) -> float:
        """Return the size in bytes above which blobs are evicted."""
        if self.bytes is None:
            return self.share * (held + free)
        return self.bytes or math.inf


class BlobStore:
    """Blobs of one agent.

    Args:
        root: directory of the store; created if missing, and readable only by the owner.
        quota: size limit.
    """

    def __init__(self, root: Path, quota: Quota = Quota()) -> None:
        self.root = root
        self.quota = quota
        self._lock = threading.Condition()
        # Digest -> full size of each upload in progress.
        self._uploading: dict[str, int] = {}
        self._pinned: dict[str, int] = {}
        # Blobs of the session's next program.
        self._held: set[str] = set()
        # Metadata of each file at its last digest check. After a power cut a file may contain anything, so each file is
        # hashed before the first use.
        self._verified: dict[str, _FileStamp] = {}
        # Blobs whose links or timestamps the store changed in this session. A program may have altered such a blob at
        # the same moment, unnoticed.
        self._doubtful: set[str] = set()
        # Number of changes that this process made to blob files or their timestamps, by storing, linking, unlinking or
        # evicting.
        self._own_changes = 0
        self._used: dict[str, float] = {}
        for folder in ("blobs", "partial", "programs"):
            (root / folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        root.chmod(0o700)
        for left in (root / "programs").iterdir():
            self._drop(left)
        # Estimated size of all blobs: programs may alter them.
        self._stored = sum(size for _, size, _ in _list_files(root / "blobs"))
        self._drop_partials()

    def hold(self, wanted: Iterable[str]) -> None:
        """Protect these blobs from eviction until the next call or the end of the session."""
        with self._lock:
            self._held = set(wanted)

    def has(self, digest: str) -> bool:
        """Return True if a blob is stored and the digest matches. A corrupt blob is deleted."""
        with contextlib.suppress(BlobDamaged):
            self.path(digest)
            return True
        return False

    def get_partial_size(self, digest: str) -> int:
        """Return the size of an interrupted upload, after pending writes have finished."""
        with self._lock:
            self._lock.wait_for(lambda: digest not in self._uploading, _SETTLES_SECONDS)
        try:
            return self._partial_path(digest).stat().st_size
        except FileNotFoundError:
            return 0

    def path(self, digest: str) -> Path:
        """Return the path of a verified blob.

        Raises BlobDamaged if the blob is missing or was altered; an altered blob is deleted.
        """
        path = self._blob_path(digest)
        while not self._is_known(digest, path):
            pass  # this process changed files during the check, which may explain the difference: retry
        self._used[digest] = time.time()
        return path

    def forget_session(self) -> None:
        """Forget the verified digests of blobs that the session used, so that the next session checks them."""
        with self._lock:
            for digest in self._doubtful:
                self._verified.pop(digest, None)
            self._doubtful.clear()
            self._held.clear()

    def upload(self, digest: str, size: int, offset: int) -> Upload:
        """Start or resume an upload.

        Raises:
            UsageError: the offset is out of range, or a different upload of the blob is in progress.
            BlobDamaged: the offset is not the end of the stored part, which may have been deleted.
            LoadFailed: the blob exceeds the quota or the disk size.
            BoardUnfit: the disk is full or not writable.
        """
        path = self._partial_path(digest)
        with self._lock:
            if not self._lock.wait_for(lambda: digest not in self._uploading, _SETTLES_SECONDS):
                raise UsageError(f"{digest} is already being uploaded")
            have = self.get_partial_size(digest)
            if not 0 <= offset <= size:
                raise UsageError(f"cannot resume a blob of {size} bytes at {offset}")
            if offset not in (0, have):
                raise BlobDamaged(
                    f"an upload of {digest} must resume at {have}, not at {offset}",
                    hint="request the list of missing blobs again, and resume at the offset in this list",
                )
            self._make_room(digest, size, have)
            self._uploading[digest] = size
        try:
            return Upload(self, digest, path, size, offset)
        except BaseException:
            self._release(digest)
            raise

    def link_program(self, files: Iterable[tuple[str, str]]) -> tuple[Path, list[str]]:
        """Create a directory with blobs under the program's file names. Return the directory and the pinned digests.

        Raises:
            UsageError: a name leads outside the directory, or is a duplicate.
            BlobDamaged: a blob is missing or was altered.
            BoardUnfit: the disk is full or not writable.
        """
        folder = self.root / "programs" / uuid.uuid4().hex

        def make() -> None:
            # Unlinking another program may have removed the parent. Do not recreate the store's root, because its mode
            # would differ.
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            folder.mkdir(mode=0o700)

        with self._report_write_errors():
            self.write(make)
        pinned: list[str] = []
        try:
            for name, digest in files:
                parts = Path(name).parts
                is_plain = name and not name.startswith("/") and ".." not in parts and "\0" not in name
                if not is_plain or len(name) > 255 or not 0 < len(parts) <= _MAX_PARTS:
                    raise UsageError(f"invalid program file name {name[:100]!r}")
                self.pin(digests.check(digest))
                pinned.append(digest)
                source = self.path(digest)
                target = folder.joinpath(*parts)
                try:
                    self.write(partial(self._link, digest, source, target))
                except FileExistsError as error:
                    raise UsageError(f"duplicate program file name {name!r}") from error
                except OSError as error:
                    raise UsageError(f"invalid program file name {name[:100]!r}: {error.strerror}") from error
        except BaseException:
            self.unlink_program(folder, pinned)
            raise
        return folder, pinned

    def _link(self, digest: str, source: Path, target: Path) -> None:
        """Hard-link a blob's file, or copy it if the file system does not support links."""
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._keep_verified(digest, source):
                os.utime(source)
                os.link(source, target)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV):
                raise
            copy_file(source, target)

    def unlink_program(self, folder: Path, pinned: list[str]) -> None:
        """Undo :meth:`link_program`."""
        with contextlib.ExitStack() as stack:
            for digest in set(pinned):
                stack.enter_context(self._keep_verified(digest, self._blob_path(digest)))
            remove_tree(folder)
        with self._lock:
            for digest in pinned:
                self._pinned[digest] -= 1
                if not self._pinned[digest]:
                    del self._pinned[digest]

    def pin(self, digest: str) -> None:
        """Protect a blob from eviction until the program is unlinked."""
        with self._lock:
            self._pinned[digest] = self._pinned.get(digest, 0) + 1

    def _is_known(self, digest: str, path: Path) -> bool:
        """Return True if a blob's file is intact, or False if this process changed files during the check.

        Raises:
            BlobDamaged: the file is missing or was altered; it is deleted.
        """
        with self._lock:
            look, changes = _read_stamp(path), self._own_changes
            if look is not None and look == self._verified.get(digest):
                return True
        # Hash without the lock, because large blobs take long.
        is_sound = look is not None and _is_sound(path, digest)
        with self._lock:
            if look is not None and is_sound and _read_stamp(path) == look:
                self._trust(digest, look)
                return True
            if self._own_changes != changes:
                return False
            self._verified.pop(digest, None)
            self._drop(path)
        what = "was modified on the board" if look else "is not on the board"
        raise BlobDamaged(f"blob {digest} {what}", hint="push the blob to the board")

    @contextlib.contextmanager
    def _keep_verified(self, digest: str, path: Path) -> Iterator[None]:
        """Keep a file marked as verified while this process changes the links or timestamps."""
        with self._lock:
            sound = self._verified.pop(digest, None)
            self._doubtful.add(digest)
            self._own_changes += 1
            is_sound = sound is not None and _read_stamp(path) == sound
            try:
                yield
            finally:
                if is_sound and (look := _read_stamp(path)) is not None:
                    self._verified[digest] = look

    def _drop_partials(self) -> None:
        """Delete interrupted uploads older than a day, then the oldest uploads above the quota."""
        held = self._stored
        limit = self.quota.limit(held, shutil.disk_usage(self.root).free)
        for _, size, path in reversed(self._delete_partials(_PARTIALS_KEPT)):
            held += size
            if held > limit:
                self._drop(path)

    def _delete_partials(self, most: int, *busy: str) -> list[tuple[float, int, Path]]:
        """Delete surplus and expired interrupted uploads.

        Return the remaining uploads, oldest first, without uploads in progress.

        Args:
            most: maximum number of uploads to retain.
            busy: further digests that are about to be resumed.
        """
        ours = {self._partial_path(digest) for digest in (*self._uploading, *busy)}
        partials = sorted(one for one in _list_files(self.root / "partial") if one[2] not in ours)
        kept = [one for one in partials[-most:] if time.time() - one[0] <= _PARTIAL_KEPT_SECONDS]
        for one in partials:
            if one not in kept:
                self._drop(one[2])
        return kept

    def _make_room(self, digest: str, size: int, have: int) -> None:
        """Evict blobs until the new blob fits into the quota and on the disk.

        Raise an error if eviction is not sufficient.
        """
        disk = self.write(lambda: shutil.disk_usage(self.root))
        partials = self._delete_partials(_PARTIALS_KEPT - 1, digest)
        coming = size + sum(self._uploading.values())
        # Uploads in progress already occupy a part of their size on the disk.
        looks = (_read_stamp(self._partial_path(one)) for one in self._uploading)
        needed = coming - have - sum(look.size for look in looks if look)
        cut = sum(length for _, length, _ in partials)
        free = disk.free - min(_RESERVED_BYTES, disk.total // 64)
        if 2 * (self._stored + cut + coming) <= self.quota.limit(self._stored, free) and needed <= free:
            return  # fast path without listing all blobs
        blobs = _list_files(self.root / "blobs")
        self._stored = sum(length for _, length, _ in blobs)
        total = self._stored + cut + coming
        limit = self.quota.limit(self._stored + cut + have, free)
        for _, length, path in [*partials, *self._list_unused(blobs)]:
            if total <= limit and needed <= free:
                break
            if self._evict(path):
                total, free = total - length, free + length
        if total > limit and self.quota.bytes is not None:
            raise LoadFailed(
                f"the board's store needs {total} bytes with this blob, maximum {self.quota.bytes}",
                hint="raise the agent's --quota",
            )
        if size > disk.total:
            raise LoadFailed(f"this blob has {size} bytes, but the board's disk has only {disk.total}")
        if needed > free:
            raise BoardUnfit(
                f"this blob needs {needed} bytes, but the board's disk has {max(free, 0)} bytes free in {self.root}",
                hint="remove files on the board, or use a directory on a different disk: the agent's --store, or "
                "[connection] folder in the board's config",
            )

    def count_free_bytes(self) -> int:
        """Return the number of bytes available for blobs: free disk space, plus the blobs that could be evicted."""
        try:
            room = shutil.disk_usage(self.root).free + self._stored
        except OSError:
            return 0
        return min(room, self.quota.bytes) if self.quota.bytes else room

    def _list_unused(self, blobs: Iterable[tuple[float, int, Path]]) -> list[tuple[float, int, Path]]:
        """Return the blobs that can be evicted, least recently used first."""
        in_use = self._pinned.keys() | self._held
        return sorted(
            (max(used, self._used.get(_digest_of(path), 0.0)), length, path)
            for used, length, path in blobs
            if _digest_of(path) not in in_use
        )

    def _evict(self, path: Path) -> bool:
        """Delete a file of the store. Return True on success."""
        self._own_changes += 1
        size = path.stat().st_size if path.exists() else 0
        self._drop(path)
        if is_gone := not path.exists():
            self._stored -= 0 if _is_cut(path) else size
        return is_gone

    def _evict_one(self) -> bool:
        """Evict the least recently used file. Return False if nothing can be evicted."""
        with self._lock:
            unused = [*self._delete_partials(_PARTIALS_KEPT), *self._list_unused(_list_files(self.root / "blobs"))]
            return bool(unused) and self._evict(unused[0][2])

    def write(self, work: Callable[[], T]) -> T:
        """Write to the store. While the disk is full, evict unused files and retry.

        Raises:
            BoardUnfit: the disk is full, faulty or read-only.
            OSError: any other error.
        """
        while True:
            try:
                return work()
            except OSError as error:
                if error.errno in FULL and self._evict_one():
                    continue
                if error.errno in FAULTS or error.errno == errno.EACCES:
                    raise make_disk_error(error, self.root) from error
                raise

    def _finish(self, digest: str, partial: Path) -> None:
        target = self._blob_path(digest)

        def move() -> None:
            target.parent.mkdir(parents=True, exist_ok=True)
            # Prevent accidental writes.
            partial.chmod(0o400)
            self._own_changes += 1
            partial.replace(target)

        with self._lock, self._report_write_errors():
            self.write(move)
            if look := _read_stamp(target):
                self._stored += look.size
                self._trust(digest, look)

    @contextlib.contextmanager
    def _report_write_errors(self) -> Iterator[None]:
        """Report every OSError as the board's fault, because the store chose these file names."""
        try:
            yield
        except OSError as error:
            raise make_disk_error(error, self.root) from error

    def _trust(self, digest: str, look: _FileStamp) -> None:
        self._verified[digest] = look
        if time.time_ns() - look.changed_ns < _TICK_NS:
            self._doubtful.add(digest)

    def _drop(self, path: Path) -> None:
        """Delete a file of the store, or a directory that replaced it."""
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            with contextlib.suppress(OSError):
                path.unlink()

    def _release(self, digest: str) -> None:
        with self._lock:
            self._uploading.pop(digest, None)
            self._lock.notify_all()

    def _blob_path(self, digest: str) -> Path:
        algorithm, _, value = digests.check(digest).partition(":")
        return self.root / "blobs" / algorithm / value[:2] / value

    def _partial_path(self, digest: str) -> Path:
        algorithm, _, value = digests.check(digest).partition(":")
        return self.root / "partial" / f"{algorithm}-{value}"


class Upload:
    """Upload of one blob. Use as a context manager; an interrupted upload remains for resumption."""

    def __init__(self, store: BlobStore, digest: str, path: Path, size: int, offset: int) -> None:
        self._store = store
        self.digest = digest
        self._partial = path
        self._size = size
        self._at = offset
        self._hasher = StreamHasher(digests.get_algorithm(digest))
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with store._report_write_errors():
            self._fd = store.write(lambda: os.open(path, flags, 0o600))
            os.ftruncate(self._fd, offset)
        for start in range(0, offset, _HASH_PIECE):
            self._hasher.update(os.pread(self._fd, min(_HASH_PIECE, offset - start), start))
        os.lseek(self._fd, offset, os.SEEK_SET)
        self._executor = OrderedExecutor()

    @property
    def missing(self) -> int:
        """Number of bytes that have not arrived yet."""
        return self._size - self._at

    def write(self, data: memoryview) -> None:
        """Append bytes.

        Raises:
            UsageError: the data exceeds the announced size.
            BoardUnfit: the disk is full or faulty.
        """
        if data.nbytes > self.missing:
            raise UsageError(f"received more than the announced {self._size} bytes for {self.digest}")
        self._at += data.nbytes
        self._hasher.update(data)
        self._executor.do(self._take, data)

    def finish(self) -> None:
        """Verify the blob and move it into the store.

        Raises BlobDamaged on a digest mismatch, and deletes the upload.
        """
        self._executor.wait()
        if self._hasher.digest() != self.digest:
            self._partial.unlink(missing_ok=True)
            raise BlobDamaged(f"digest mismatch: the upload of {self.digest} is corrupt", hint="retry the upload")
        self._store._finish(self.digest, self._partial)

    def _take(self, data: memoryview) -> None:
        written = 0
        try:
            with self._store._report_write_errors():
                while written < data.nbytes:
                    written += self._store.write(partial(os.write, self._fd, data[written:]))
        except BoardUnfit:
            with contextlib.suppress(OSError):
                self._partial.unlink()
            raise

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        # Finish pending writes even after a failure, before the next call reads the file's size.
        with contextlib.suppress(Exception):
            self._executor.finish()
        os.close(self._fd)
        self._store._release(self.digest)


class _FileStamp(NamedTuple):
    """Metadata of a file. A change of content changes ``changed_ns``, which only the kernel can set."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


def _read_stamp(path: Path) -> _FileStamp | None:
    """Return the metadata of a regular file, or None."""
    try:
        stat = path.lstat()
    except OSError:
        return None
    if not S_ISREG(stat.st_mode):
        return None
    return _FileStamp(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def _is_sound(path: Path, digest: str) -> bool:
    """Return True if a file has this digest. Return False for a missing or unreadable file.

    Raises:
        BoardUnfit: the disk is faulty.
    """
    try:
        return digest_file(path, digests.get_algorithm(digest)) == digest
    except OSError as error:
        if error.errno in FAULTS:
            raise make_disk_error(error, path) from error
    except UsageError:
        pass
    return False


def _digest_of(path: Path) -> str:
    return f"{path.parent.parent.name}:{path.name}"


def _is_cut(path: Path) -> bool:
    """Return True if a file of the store is an interrupted upload."""
    return path.parent.name == "partial"


def _list_files(folder: Path) -> list[tuple[float, int, Path]]:
    """Return the time of the last write or use, the size in bytes and the path of each file below a directory."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            stat = path.lstat()
            if S_ISREG(stat.st_mode):
                found.append((stat.st_mtime, stat.st_size, path))
    return found

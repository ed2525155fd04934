"""Blobs by content, in one folder: written atomically, verified, resumable, evicted least-recently-used under a quota.

One agent at a time has the folder: it holds a lock on it. A blob's path is made of its digest only, and a digest is
checked before it becomes a path, so nothing from the wire can name a file outside the folder.

A program that runs here may write what the agent may: a blob can be changed at any time. Before each use a blob's file
is looked at, and where it is not as it was when its digest was checked, the digest is checked again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

from hil.core import digest as digests
from hil.core.digest import OrderedExecutor, StreamHasher
from hil.core.scratch import remove_tree
from hil.errors import BlobDamaged, LoadFailed, UsageError

_HASH_PIECE = 1 << 20
# A cut upload is gone on with soon, or never; and nobody has many of them.
_PARTIAL_KEPT_S = 24 * 3600.0
_PARTIALS_KEPT = 16
# Folders in folders for a program's file.
_MOST_PARTS = 16
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# Files' times are those of a clock that ticks every few milliseconds: what is altered within a tick looks the same.
_TICK_NS = 100_000_000
# How long a connection that broke may take to let go of its upload before another one goes on with it.
_SETTLES_S = 5.0
# A file system without locks: there, keeping agents apart is left to whoever starts them.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class BlobStore:
    """The blobs of one agent.

    Args:
        root: its folder, made if needed, readable by the owner only.
        quota_bytes: the most that blobs and uploads together may take before cut uploads, and then the oldest unused
            blobs, are dropped; 0 is no limit.
    """

    def __init__(self, root: Path, quota_bytes: int = 0) -> None:
        self.root = root
        self.quota_bytes = quota_bytes
        self._lock = threading.Condition()
        # Of each upload that is going on its whole size: it will be there.
        self._uploading: dict[str, int] = {}
        self._pinned: dict[str, int] = {}
        # The files whose digests this process has checked, as they were then. After a power cut a file may hold
        # anything: each is hashed once before its first use.
        self._verified: dict[str, _Look] = {}
        # What a program of the current session can have altered unseen, just when the file's times were changed by us.
        self._doubtful: set[str] = set()
        # How often we altered a blob's file, or its times: put it in its place, gave or took a name, evicted it.
        self._own_changes = 0
        self._used: dict[str, float] = {}
        for folder in ("blobs", "partial", "programs"):
            (root / folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        root.chmod(0o700)
        for left in (root / "programs").iterdir():
            self._drop(left)
        self._drop_partials()

    def has(self, digest: str) -> bool:
        """Whether a blob is here and sound; a damaged one is dropped."""
        with contextlib.suppress(BlobDamaged):
            self.path(digest)
            return True
        return False

    def partial_size(self, digest: str) -> int:
        """How many bytes of a cut upload are kept, once all that came of it is written down."""
        with self._lock:
            self._lock.wait_for(lambda: digest not in self._uploading, _SETTLES_S)
        try:
            return self._partial(digest).stat().st_size
        except FileNotFoundError:
            return 0

    def path(self, digest: str) -> Path:
        """The file of a blob, which is sound. Raises BlobDamaged: it is not here, or was altered, and is dropped."""
        path = self._path(digest)
        while not self._is_known(digest, path):
            pass  # we have altered files meanwhile: what looks another way now may be our own doing
        self._used[digest] = time.time()
        return path

    def forget_session(self) -> None:
        """Check the digests of what a session has used or brought once more, before another session uses it."""
        with self._lock:
            for digest in self._doubtful:
                self._verified.pop(digest, None)
            self._doubtful.clear()

    def upload(self, digest: str, size: int, offset: int) -> Upload:
        """Begin or go on with an upload.

        Raises:
            UsageError: the offset makes no sense, or another upload of the same blob is going on.
            BlobDamaged: the offset is not where the kept part ends: it was dropped, maybe.
            LoadFailed: there is no room for it.
        """
        path = self._partial(digest)
        with self._lock:
            if not self._lock.wait_for(lambda: digest not in self._uploading, _SETTLES_S):
                raise UsageError(f"{digest} is being uploaded already")
            have = self.partial_size(digest)
            if not 0 <= offset <= size:
                raise UsageError(f"a blob of {size} bytes cannot go on at {offset}")
            if offset not in (0, have):
                raise BlobDamaged(
                    f"an upload of {digest} goes on at {have}, not at {offset}", hint="ask what is missing"
                )
            self._make_room(digest, size, have)
            self._uploading[digest] = size
        try:
            return Upload(self, digest, path, size, offset)
        except BaseException:
            self._release(digest)
            raise

    def link_program(self, files: Iterable[tuple[str, str]]) -> tuple[Path, list[str]]:
        """A folder in which blobs lie under the names a program knows them by; returns it and the pinned digests.

        Raises:
            UsageError: a name leads out of the folder, or is given twice.
            BlobDamaged: a blob is not here, or was altered.
            LoadFailed: the disk is full.
        """
        folder = self.root / "programs" / uuid.uuid4().hex
        with _written():
            folder.mkdir(mode=0o700)
        pinned: list[str] = []
        try:
            for name, digest in files:
                parts = Path(name).parts
                is_plain = name and not name.startswith("/") and ".." not in parts and "\0" not in name
                if not is_plain or len(name) > 255 or not 0 < len(parts) <= _MOST_PARTS:
                    raise UsageError(f"a program file cannot be named {name[:100]!r}")
                self.pin(digests.check(digest))
                pinned.append(digest)
                source = self.path(digest)
                target = folder.joinpath(*parts)
                try:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with self._changing(digest, source):
                        os.utime(source)
                        os.link(source, target)
                except FileExistsError as error:
                    raise UsageError(f"two files of a program are named {name!r}") from error
                except OSError as error:
                    if error.errno in _FULL:
                        raise _unwritable(error) from error
                    if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV):
                        raise UsageError(f"a program file cannot be named {name[:100]!r}: {error.strerror}") from error
                    with _written():
                        shutil.copyfile(source, target)
        except BaseException:
            self.unlink_program(folder, pinned)
            raise
        return folder, pinned

    def unlink_program(self, folder: Path, pinned: list[str]) -> None:
        """Undo :meth:`link_program`."""
        with contextlib.ExitStack() as stack:
            for digest in set(pinned):
                stack.enter_context(self._changing(digest, self._path(digest)))
            remove_tree(folder)
        with self._lock:
            for digest in pinned:
                self._pinned[digest] -= 1
                if not self._pinned[digest]:
                    del self._pinned[digest]

    def pin(self, digest: str) -> None:
        """Keep a blob from being evicted until its program is unlinked."""
        with self._lock:
            self._pinned[digest] = self._pinned.get(digest, 0) + 1

    def _is_known(self, digest: str, path: Path) -> bool:
        """Whether a blob's file is sound; false where that cannot be told, for we altered files while it was hashed.

        Raises:
            BlobDamaged: it is not here, or somebody else altered it, and is dropped.
        """
        with self._lock:
            look, changes = _look(path), self._own_changes
            if look is not None and look == self._verified.get(digest):
                return True
        # Without the lock: it takes as long as the blob is large.
        is_sound = look is not None and _is_sound(path, digest)
        with self._lock:
            if look is not None and is_sound and _look(path) == look:
                self._trust(digest, look)
                return True
            if self._own_changes != changes:
                return False
            self._verified.pop(digest, None)
            self._drop(path)
        what = "was altered on the board" if look else "is not on the board"
        raise BlobDamaged(f"blob {digest} {what}", hint="push it again")

    @contextlib.contextmanager
    def _changing(self, digest: str, path: Path) -> Iterator[None]:
        """Give or take one of a file's names, or note its use: that alters the times by which it is known, not it."""
        with self._lock:
            sound = self._verified.pop(digest, None)
            self._doubtful.add(digest)
            self._own_changes += 1
            is_sound = sound is not None and _look(path) == sound
            try:
                yield
            finally:
                if is_sound and (look := _look(path)) is not None:
                    self._verified[digest] = look

    def _drop_partials(self) -> None:
        """Drop cut uploads that nobody went on with for a day, and then the oldest of those beyond the quota."""
        held = sum(size for _, size, _ in _files(self.root / "blobs"))
        for _, size, path in reversed(self._kept_partials(_PARTIALS_KEPT)):
            held += size
            if 0 < self.quota_bytes < held:
                self._drop(path)

    def _kept_partials(self, most: int, *busy: str) -> list[tuple[float, int, Path]]:
        """The cut uploads that nobody goes on with just now, the oldest first.

        Those beyond so many are dropped, and those that nobody went on with for a day.

        Args:
            busy: digests of what is gone on with, beside the uploads that are known.
        """
        ours = {self._partial(digest) for digest in (*self._uploading, *busy)}
        partials = sorted(one for one in _files(self.root / "partial") if one[2] not in ours)
        kept = [one for one in partials[-most:] if time.time() - one[0] <= _PARTIAL_KEPT_S]
        for one in partials:
            if one not in kept:
                self._drop(one[2])
        return kept

    def _make_room(self, digest: str, size: int, have: int) -> None:
        """Evict what the quota asks for, and refuse what the disk cannot hold."""
        partials = self._kept_partials(_PARTIALS_KEPT - 1, digest)
        if self.quota_bytes:
            blobs = [
                (max(used, self._used.get(_digest_of(path), 0.0)), length, path)
                for used, length, path in _files(self.root / "blobs")
            ]
            total = size + sum(self._uploading.values()) + sum(length for _, length, _ in (*partials, *blobs))
            for _, length, path in (*partials, *sorted(blobs)):
                if total <= self.quota_bytes:
                    break
                if _digest_of(path) not in self._pinned:
                    self._own_changes += 1
                    self._drop(path)
                    total -= length
            if total > self.quota_bytes:
                raise LoadFailed(
                    f"the board's store may hold {self.quota_bytes} bytes and with this blob would hold {total}",
                    hint="raise the agent's --quota",
                )
        free = shutil.disk_usage(self.root).free
        # Of the uploads that are going on a part is on the disk already.
        looks = (_look(self._partial(digest)) for digest in self._uploading)
        needed = size - have + sum(self._uploading.values()) - sum(look.size for look in looks if look)
        if needed > free:
            raise LoadFailed(f"the board's disk has {free} bytes free and this blob needs {needed}")

    def _finish(self, digest: str, partial: Path) -> None:
        target = self._path(digest)
        with self._lock, _written():
            target.parent.mkdir(parents=True, exist_ok=True)
            # Nobody writes to it by mistake.
            partial.chmod(0o400)
            self._own_changes += 1
            partial.replace(target)
            if look := _look(target):
                self._trust(digest, look)

    def _trust(self, digest: str, look: _Look) -> None:
        self._verified[digest] = look
        if time.time_ns() - look.changed_ns < _TICK_NS:
            self._doubtful.add(digest)

    def _drop(self, path: Path) -> None:
        """Remove a file of ours, or whatever somebody put in its place."""
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            with contextlib.suppress(OSError):
                path.unlink()

    def _release(self, digest: str) -> None:
        with self._lock:
            self._uploading.pop(digest, None)
            self._lock.notify_all()

    def _path(self, digest: str) -> Path:
        algorithm, _, value = digests.check(digest).partition(":")
        return self.root / "blobs" / algorithm / value[:2] / value

    def _partial(self, digest: str) -> Path:
        algorithm, _, value = digests.check(digest).partition(":")
        return self.root / "partial" / f"{algorithm}-{value}"


class Upload:
    """One blob on its way in. A context manager: what was written stays for a later upload to go on from."""

    def __init__(self, store: BlobStore, digest: str, path: Path, size: int, offset: int) -> None:
        self._store = store
        self.digest = digest
        self._partial = path
        self._size = size
        self._at = offset
        self._hasher = StreamHasher(digests.algorithm_of(digest))
        with _written():
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
            os.ftruncate(self._fd, offset)
        for start in range(0, offset, _HASH_PIECE):
            self._hasher.update(os.pread(self._fd, min(_HASH_PIECE, offset - start), start))
        os.lseek(self._fd, offset, os.SEEK_SET)
        self._executor = OrderedExecutor()

    @property
    def missing(self) -> int:
        """Bytes that have not come yet."""
        return self._size - self._at

    def write(self, data: memoryview) -> None:
        """Add bytes.

        Raises:
            UsageError: more came than was announced.
            LoadFailed: the disk is full.
        """
        if data.nbytes > self.missing:
            raise UsageError(f"more than the announced {self._size} bytes came for {self.digest}")
        self._at += data.nbytes
        self._hasher.update(data)
        self._executor.do(self._take, data)

    def finish(self) -> None:
        """Verify the blob and put it in its place. Raises BlobDamaged: not what its digest says, and dropped."""
        self._executor.wait()
        if self._hasher.digest() != self.digest:
            self._partial.unlink(missing_ok=True)
            raise BlobDamaged(f"what came is not {self.digest}: the upload was damaged", hint="send it again")
        self._store._finish(self.digest, self._partial)

    def _take(self, data: memoryview) -> None:
        try:
            written = 0
            while written < data.nbytes:
                written += os.write(self._fd, data[written:])
        except OSError as error:
            self._partial.unlink(missing_ok=True)
            raise _unwritable(error) from error

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        # After a failure too: what is on its way into the file is written before anybody asks for its size.
        with contextlib.suppress(Exception):
            self._executor.finish()
        os.close(self._fd)
        self._store._release(self.digest)


class _Look(NamedTuple):
    """What a file looks like from outside. Whoever alters its content alters a time that only the clock sets."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


def _look(path: Path) -> _Look | None:
    """How a file looks; None where there is none, or something else."""
    try:
        stat = path.lstat()
    except OSError:
        return None
    if not S_ISREG(stat.st_mode):
        return None
    return _Look(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def _is_sound(path: Path, digest: str) -> bool:
    """Whether a file has this digest; one that cannot be read, or is gone by now, has not."""
    with contextlib.suppress(OSError, UsageError):
        return digests.digest_file(path, digests.algorithm_of(digest)) == digest
    return False


def _digest_of(path: Path) -> str:
    return f"{path.parent.parent.name}:{path.name}"


@contextlib.contextmanager
def _written() -> Iterator[None]:
    """A folder that cannot be written to is told as what it is."""
    try:
        yield
    except OSError as error:
        raise _unwritable(error) from error


def _unwritable(error: OSError) -> LoadFailed:
    return LoadFailed(f"the board's store cannot be written: {error.strerror}", hint="make room on the board's disk")


def _files(folder: Path) -> list[tuple[float, int, Path]]:
    """The files below a folder: when each was last written or used, its size in bytes, and its path."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            stat = path.lstat()
            if S_ISREG(stat.st_mode):
                found.append((stat.st_mtime, stat.st_size, path))
    return found


class StoreLock:
    """Keeps a store to one agent, from now until :meth:`release` or the agent's end, however that comes.

    Raises:
        UsageError: another agent has it, or the folder cannot be used.
    """

    def __init__(self, root: Path) -> None:
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Closed in the workers: one that outlives a killed agent must not go on holding the store.
            self._file = os.fdopen(os.open(root / "lock", os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
        except OSError as error:
            raise UsageError(f"the store {root} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return
            owner = os.pread(self._file.fileno(), 20, 0).decode(errors="replace")
            self.release()
            raise UsageError(
                f"the store {root} is in use by another agent{owner and f' (process {owner})'}",
                hint="stop that agent, or give this one another --store",
            ) from error
        self._file.truncate(0)
        self._file.write(str(os.getpid()).encode())

    def release(self) -> None:
        """Let another agent have the store."""
        self._file.close()

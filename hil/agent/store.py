"""Blobs by content, in one folder: written atomically, verified, resumable, evicted least-recently-used under a quota.

A blob's path is made of its digest only, and a digest is checked before it becomes a path, so nothing from the wire
can name a file outside the folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from stat import S_ISREG

from hil import digest as digests
from hil.agent.removal import remove_tree
from hil.behind import Behind, StreamHasher
from hil.errors import LoadFailed, UsageError

_HASH_PIECE = 1 << 20
# A cut upload is gone on with soon, or never.
_PARTIAL_KEPT_S = 24 * 3600.0
# How long a connection that broke may take to let go of its upload before another one goes on with it.
_SETTLES_S = 5.0


class BlobStore:
    """The blobs of one agent.

    Args:
        root: its folder, made if needed, readable by the owner only.
        quota_bytes: the most that blobs may take before the oldest unused ones are dropped; 0 is no limit.
    """

    def __init__(self, root: Path, quota_bytes: int = 0) -> None:
        self.root = root
        self.quota_bytes = quota_bytes
        self._lock = threading.Condition()
        self._uploading: set[str] = set()
        self._pinned: dict[str, int] = {}
        # Proven by this process. After a power cut a file may hold anything: each is hashed once before its first use.
        self._verified: set[str] = set()
        for folder in ("blobs", "partial", "programs"):
            (root / folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        root.chmod(0o700)
        for left in (root / "programs").iterdir():
            remove_tree(left)
        self._drop_partials()

    def has(self, digest: str) -> bool:
        """Whether a blob is here and sound; a damaged one is dropped."""
        path = self._path(digest)
        if not path.is_file():
            return False
        if digest not in self._verified:
            if digests.digest_file(path, digests.algorithm_of(digest)) != digest:
                path.unlink(missing_ok=True)
                return False
            self._verified.add(digest)
        with contextlib.suppress(OSError):
            os.utime(path)
        return True

    def partial_size(self, digest: str) -> int:
        """How many bytes of a cut upload are kept, once all that came of it is written down."""
        with self._lock:
            self._lock.wait_for(lambda: digest not in self._uploading, _SETTLES_S)
        try:
            return self._partial(digest).stat().st_size
        except FileNotFoundError:
            return 0

    def path(self, digest: str) -> Path:
        """The file of a blob.

        Raises:
            LoadFailed: it is not here.
        """
        if not self.has(digest):
            raise LoadFailed(f"the board does not have blob {digest}", hint="push it first")
        return self._path(digest)

    def upload(self, digest: str, size: int, offset: int) -> Upload:
        """Begin or go on with an upload.

        Raises:
            UsageError: the offset is not where the kept part ends, or another upload of the same blob is going on.
            LoadFailed: there is no room for it.
        """
        path = self._partial(digest)
        with self._lock:
            if not self._lock.wait_for(lambda: digest not in self._uploading, _SETTLES_S):
                raise UsageError(f"{digest} is being uploaded already")
            have = self.partial_size(digest)
            if offset not in (0, have) or offset > size:
                raise UsageError(f"an upload of {digest} goes on at {have}, not at {offset}")
            self._make_room(size - offset, self.partial_size(digest) - offset)
            self._uploading.add(digest)
        try:
            return Upload(self, digest, path, size, offset)
        except BaseException:
            self._release(digest)
            raise

    def link_program(self, files: Iterable[tuple[str, str]]) -> tuple[Path, list[str]]:
        """A folder in which blobs lie under the names a program knows them by; returns it and the pinned digests.

        Raises:
            UsageError: a name leads out of the folder, or is given twice.
            LoadFailed: a blob is not here.
        """
        folder = self.root / "programs" / uuid.uuid4().hex
        folder.mkdir(mode=0o700)
        pinned: list[str] = []
        try:
            for name, digest in files:
                parts = Path(name).parts
                if not name or name.startswith("/") or ".." in parts or "\0" in name or len(name) > 255 or not parts:
                    raise UsageError(f"a program file cannot be named {name[:100]!r}")
                source = self.path(digest)
                self.pin(digest)
                pinned.append(digest)
                target = folder.joinpath(*parts)
                try:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.link(source, target)
                except FileExistsError as error:
                    raise UsageError(f"two files of a program are named {name!r}") from error
                except OSError as error:
                    if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV):
                        raise UsageError(f"a program file cannot be named {name[:100]!r}: {error.strerror}") from error
                    shutil.copyfile(source, target)
        except BaseException:
            self.unlink_program(folder, pinned)
            raise
        return folder, pinned

    def unlink_program(self, folder: Path, pinned: list[str]) -> None:
        """Undo :meth:`link_program`."""
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

    def _drop_partials(self) -> None:
        """Drop cut uploads that nobody went on with for a day, and then the oldest of those beyond the quota."""
        partials = sorted(_files(self.root / "partial"))
        held = sum(size for _, size, _ in (*partials, *_files(self.root / "blobs")))
        for changed, size, path in partials:
            if time.time() - changed > _PARTIAL_KEPT_S or 0 < self.quota_bytes < held:
                path.unlink(missing_ok=True)
                held -= size

    def _make_room(self, needed: int, reclaimed: int) -> None:
        """Evict what the quota asks for, and refuse what the disk cannot hold."""
        if self.quota_bytes:
            blobs = sorted(_files(self.root / "blobs"))
            total = sum(size for _, size, _ in blobs)
            for _, size, path in blobs:
                if total + needed <= self.quota_bytes:
                    break
                if f"{path.parent.parent.name}:{path.name}" not in self._pinned:
                    path.unlink(missing_ok=True)
                    total -= size
            if total + needed > self.quota_bytes:
                raise LoadFailed(
                    f"the board's store may hold {self.quota_bytes} bytes and this blob needs {needed} more",
                    hint="raise the agent's --quota",
                )
        free = shutil.disk_usage(self.root).free + max(reclaimed, 0)
        if needed > free:
            raise LoadFailed(f"the board's disk has {free} bytes free and this blob needs {needed}")

    def _finish(self, digest: str, partial: Path) -> None:
        target = self._path(digest)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.replace(target)
        self._verified.add(digest)

    def _release(self, digest: str) -> None:
        with self._lock:
            self._uploading.discard(digest)
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
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        os.ftruncate(self._fd, offset)
        for start in range(0, offset, _HASH_PIECE):
            self._hasher.update(os.pread(self._fd, min(_HASH_PIECE, offset - start), start))
        os.lseek(self._fd, offset, os.SEEK_SET)
        self._behind = Behind()

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
        self._behind.do(self._take, data)

    def finish(self) -> None:
        """Verify the blob and put it in its place.

        Raises:
            UsageError: its content is not what its digest says; it was dropped.
        """
        self._behind.wait()
        if self._hasher.digest() != self.digest:
            self._partial.unlink(missing_ok=True)
            raise UsageError(f"what came is not {self.digest}: the upload was damaged", hint="send it again")
        self._store._finish(self.digest, self._partial)

    def _take(self, data: memoryview) -> None:
        try:
            written = 0
            while written < data.nbytes:
                written += os.write(self._fd, data[written:])
        except OSError as error:
            self._partial.unlink(missing_ok=True)
            raise LoadFailed(f"the board's store cannot be written: {error.strerror}", stage="push") from error

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        # After a failure too: what is on its way into the file is written before anybody asks for its size.
        with contextlib.suppress(Exception):
            self._behind.finish()
        os.close(self._fd)
        self._store._release(self.digest)


def _files(folder: Path) -> list[tuple[float, int, Path]]:
    """The files below a folder: when each was last written or used, its size in bytes, and its path."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            stat = path.lstat()
            if S_ISREG(stat.st_mode):
                found.append((stat.st_mtime, stat.st_size, path))
    return found

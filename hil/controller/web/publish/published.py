"""Content-addressed store for published sessions. A session appears atomically.

``.hil-web/blobs`` contains each blob once, by digest. Files of sessions are hard links to blobs. Incomplete uploads are
in ``.hil-web/partial``, by digest and size. Sessions under construction are in ``.hil-web/staging``. Space is counted
before writing, see :mod:`hil.controller.web.files.quota`. The total is in ``.hil-web/used``, which all servers of the
directory share.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from hil.controller.storage.runs import convert_write_errors
from hil.controller.web.files.quota import count_bytes, count_name_bytes, count_tree, has_room
from hil.controller.web.publish.parcels import MAX_SESSION, STORE, FileEntry, Parcel
from hil.controller.web.readers import RECORDS
from hil.core.cancellation import check_cancelled, hold_lock
from hil.core.digest import check, get_algorithm
from hil.core.files import digest_file, open_file
from hil.errors import UsageError

# Subdirectory of the first served directory.
PUBLISHED = "published"
# Default limit for all sessions together.
MAX_BYTES = 64 << 30
# Seconds before incomplete uploads and unused blobs are deleted.
KEEP_SECONDS = 24 * 3600.0
# Maximum incomplete uploads. At the limit, a new upload replaces the upload that has received no data for the longest
# time.
_MAX_PARTIAL = 256
# Minimum seconds between recounts after a request does not fit.
_COUNT_SECONDS = 5.0
# Seconds between attempts to lock a store that another server has locked.
_WAIT_SECONDS = 0.01
# Errors of a file system without locks. On such a file system, each server counts independently.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
# Errors of a file system without hard links.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV)
_OPTION = "--published"


class Refused(UsageError):
    """Rejected upload, with an HTTP status."""

    def __init__(self, status: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


class Missing(Refused):
    """Rejected session, because some blobs are missing."""

    def __init__(self, digests: Mapping[str, int]) -> None:
        super().__init__(409, f"{len(digests)} of the session's files are missing on the server")
        self.digests = digests


@dataclass(frozen=True)
class PublishedSession:
    """Session in the store."""

    folder: Path
    new: bool  # False if it already existed


class PublishedStore:
    """Store for published sessions in a directory. Safe for concurrent threads and servers.

    Args:
        folder: directory of the store. Created on first use.
        most: maximum bytes for the store, as :mod:`hil.controller.web.files.quota` counts them.
    """

    def __init__(self, folder: Path, most: int = MAX_BYTES) -> None:
        self.folder = folder
        self._most = most
        self._own = folder / STORE
        self._lock = threading.Lock()
        self._used: int | None = None  # None before the first count
        self._counted_at = 0.0

    @property
    def used(self) -> int:
        """Size of the store in bytes, as :mod:`hil.controller.web.files.quota` counts it."""
        with self._lock_store():
            return self._used if self._used is not None else self._recount_used()

    def missing(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the missing digests with the number of bytes already received. ``sizes`` maps digests to sizes."""
        with hold_lock(self._lock):
            return {
                digest: min(_read_file_size(self._get_partial_path(digest, size)), size)
                for digest, size in sizes.items()
                if _read_file_size(self._get_blob_path(digest), -1) != size
            }

    def put(self, digest: str, offset: int, size: int, data: bytes) -> int:
        """Append data to an upload. Return the number of bytes received. A complete upload is verified.

        Raises:
            Refused: the offset does not match, the store is full, or the digest does not match.
            StorageError: the disk is full or not writable.
        """
        check(digest)
        if not 0 <= offset <= offset + len(data) <= size <= MAX_SESSION:
            raise Refused(400, "invalid offset or size")
        with self._lock_store():
            partial, blob = self._get_partial_path(digest, size), self._get_blob_path(digest)
            if _read_file_size(blob, -1) == size:
                return size
            have = _read_file_size(partial)
            if offset != have:
                raise Refused(409, f"offset mismatch: the server has {have} bytes", hint=str(have))
            if not data and have < size:
                raise Refused(400, "empty piece")
            is_new = not partial.exists()
            more = count_bytes(have + len(data)) - (0 if is_new else count_bytes(have))
            self._make_room(more, is_new=is_new)
            self._count_used(more)
            with os.fdopen(
                os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600), "ab"
            ) as file:
                file.write(data)
                if have + len(data) == size:
                    file.flush()
                    os.fsync(file.fileno())
            have += len(data)
            if have == size:
                if digest_file(partial, get_algorithm(digest)) != digest:
                    partial.unlink()
                    self._count_used(-count_bytes(size))
                    raise Refused(
                        422,
                        "digest mismatch",
                        hint="if a program is still writing to the file, wait until it has finished, then retry",
                    )
                partial.replace(blob)
                blob.chmod(0o444)
            return have

    def finish(self, parcel: Parcel) -> PublishedSession:
        """Create a session from stored blobs. The session appears atomically.

        Raises:
            Missing: some blobs are missing.
            Refused: the parcel is not a session, or a different session has this name.
            StorageError: the store is not writable.
        """
        if not any(one.name in RECORDS for one in parcel.files):
            raise Refused(
                400, "not a stored session: record missing", hint=f"expected record files: {', '.join(RECORDS)}"
            )
        target = self.folder / parcel.id
        with self._lock_store():
            if target.is_symlink() or target.exists():
                if target.is_symlink() or not _is_same(target, parcel):
                    raise Refused(
                        409,
                        f"a different session {parcel.id!r} exists on the server",
                        hint="use --as NAME to publish under a different name",
                    )
                return PublishedSession(target, new=False)
            if absent := self._find_missing_blobs(parcel):
                raise Missing(absent)
            more = _count_name_bytes(parcel)
            self._make_room(more)
            self._count_used(more)
            staging = self._own / "staging" / secrets.token_hex(8)
            try:
                for one in parcel.files:
                    place = staging / one.name
                    place.parent.mkdir(parents=True, exist_ok=True)
                    self._link_blob(one, place)
                staging.rename(target)
            except BaseException:
                self._used = None
                raise
            finally:
                shutil.rmtree(staging, ignore_errors=True)
        return PublishedSession(target, new=True)

    def _find_missing_blobs(self, parcel: Parcel) -> dict[str, int]:
        """Return the missing blobs. Delete damaged ones."""
        absent = {}
        for digest, size in {one.digest: one.size for one in parcel.files}.items():
            blob = self._get_blob_path(digest)
            found = _read_file_size(blob, -1)
            if found >= 0 and (found != size or digest_file(blob, get_algorithm(digest)) != digest):
                blob.unlink()
                self._used = None  # existing sessions may still link to the file
                found = -1
            if found < 0:
                absent[digest] = 0
        return absent

    def _link_blob(self, one: FileEntry, place: Path) -> None:
        """Link a blob to a path. Raises Refused if the name exists, or a copy does not fit."""
        blob = self._get_blob_path(one.digest)
        try:
            os.link(blob, place)
        except FileExistsError as error:  # a file system that ignores case or normalizes names
            raise Refused(400, f"duplicate file name {one.name!r} on the server's file system") from error
        except OSError as error:
            if error.errno == errno.EMLINK:  # the blob has too many links: continue with a copy
                fresh = self._own / "staging" / secrets.token_hex(8)
                self._copy_blob(one, fresh)
                fresh.replace(blob)
                os.link(blob, place)
            elif error.errno in _NO_LINKS:
                self._copy_blob(one, place)
            else:
                raise

    def _copy_blob(self, one: FileEntry, place: Path) -> None:
        self._make_room(count_bytes(one.size))
        self._count_used(count_bytes(one.size))
        with open_file(self._get_blob_path(one.digest)) as source, place.open("xb") as copy:
            shutil.copyfileobj(source, copy)
        place.chmod(0o444)

    def _make_room(self, more: int, *, is_new: bool = False) -> None:
        """Raise Refused if ``more`` counted bytes do not fit.

        Args:
            is_new: True for the first data of an upload.
        """
        if self._used is None:
            self._recount_used()
        if is_new:
            self._drop_partials()
        if self._find_room_error(more) is not None and time.monotonic() - self._counted_at >= _COUNT_SECONDS:
            self._delete_expired()
            self._recount_used()
        if refusal := self._find_room_error(more):
            raise refusal

    def _find_room_error(self, more: int) -> Refused | None:
        if (self._used or 0) + more > self._most:
            return Refused(
                507,
                f"storage limit for published sessions reached: {self._most / 1e9:.1f} GB",
                hint="delete published sessions on the server, or raise --published-gb",
            )
        # The index is in the user's cache directory.
        if not all(has_room(place, more) for place in (self.folder, Path(platformdirs.user_cache_dir("hil")))):
            return Refused(507, "the server's disk is full", hint="free disk space on the server")
        return None

    def _count_used(self, more: int) -> None:
        self._used = (self._used or 0) + more

    def _drop_partials(self) -> None:
        """Delete expired incomplete uploads, and the oldest ones at the limit."""
        before = time.time() - KEEP_SECONDS
        found = sorted((path.lstat().st_mtime, path) for path in (self._own / "partial").iterdir())
        surplus = len(found) + 1 - _MAX_PARTIAL
        for number, (changed, path) in enumerate(found):
            if number < surplus or changed < before:
                self._count_used(-count_bytes(_read_file_size(path)))
                _delete_path(path)

    def _delete_expired(self) -> None:
        """Delete old blobs without sessions, and old incomplete uploads."""
        before = time.time() - KEEP_SECONDS
        for kind in ("blobs", "partial", "staging"):
            for path in (self._own / kind).iterdir():
                found = path.lstat()
                if found.st_mtime < before and (kind != "blobs" or found.st_nlink == 1):
                    _delete_path(path)

    def _recount_used(self) -> int:
        self._used, self._counted_at = count_tree(self.folder, STORE), time.monotonic()
        return self._used

    @contextlib.contextmanager
    def _lock_store(self) -> Iterator[None]:
        """Lock the store against other threads and servers, and share the count."""
        with hold_lock(self._lock), convert_write_errors(self.folder, _OPTION):
            self._create_folders()
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(self._own / "used", flags, 0o600), "r+b", buffering=0) as file:
                _lock_file(file.fileno())
                text = file.read(20)
                self._used = int(text) if text.isdigit() else None
                # The file is empty while it is locked. If a server dies with the lock, the next server counts again.
                file.truncate(0)
                try:
                    yield
                finally:
                    if self._used is not None:
                        os.pwrite(file.fileno(), str(self._used).encode(), 0)

    def _create_folders(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for folder in (self._own, *(self._own / kind for kind in ("blobs", "partial", "staging"))):
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.is_symlink():
                raise Refused(409, f"{folder.name} is a link", hint="remove it")

    def _get_blob_path(self, digest: str) -> Path:
        return self._own / "blobs" / check(digest).replace(":", "-")

    def _get_partial_path(self, digest: str, size: int) -> Path:
        # The size is part of the name, so that an upload with a wrong size cannot block the upload with the right size.
        return self._own / "partial" / f"{check(digest).replace(':', '-')}-{size}"


def _lock_file(descriptor: int) -> None:
    """Lock a file until it is closed. Raises WorkCancelled if the request is cancelled meanwhile."""
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            check_cancelled()
            time.sleep(_WAIT_SECONDS)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return
            raise


def _delete_path(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _read_file_size(path: Path, absent: int = 0) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return absent


def _count_name_bytes(parcel: Parcel) -> int:
    """Return the counted bytes of a session without blobs: directories and file names."""
    names = sum(count_name_bytes(one.name, one.size) for one in parcel.files)
    return names + sum(count_bytes(0) + count_name_bytes(folder, 0) for folder in ("", *parcel.folders))


def _is_same(folder: Path, parcel: Parcel) -> bool:
    """Return True if a directory contains exactly the session's files. Hidden files are ignored."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if not path.is_dir()}
    shown = {name for name in found if not any(part.startswith(".") for part in name.split("/"))}
    return shown == {one.name for one in parcel.files} and all(
        not found[one.name].is_symlink()
        and _read_file_size(found[one.name], -1) == one.size
        and digest_file(found[one.name], get_algorithm(one.digest)) == one.digest
        for one in parcel.files
    )

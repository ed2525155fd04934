"""Sessions that others sent: kept below one folder, by content, each there as a whole or not at all.

``.hil-web/blobs`` holds each content once, by digest; a session's files are links to these. What is on its way lies in
``.hil-web/partial``, a session that is put together in ``.hil-web/staging``.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hil.controller.storage.runs import storing
from hil.controller.web.parcels import MOST_SESSION, FileEntry, Parcel
from hil.controller.web.readers import RECORDS
from hil.core.digest import algorithm_of, check, digest_file
from hil.errors import UsageError

# The folder, in the first one that is served.
PUBLISHED = "published"
# What all sessions together may have, where nobody says otherwise.
MOST_BYTES = 64 << 30
# What is left of the disk for others.
LEAVE_FREE = 1 << 30
# Pieces of a file that was never sent to its end are kept so long, and content that no session has any more.
KEEP_S = 24 * 3600.0
_MOST_PARTIAL = 256
_OPTION = "--published"
# What a store keeps for itself.
_OWN = ".hil-web"


def is_published(session: Path) -> bool:
    """Whether a session's folder lies in a store: it may have been run on another machine."""
    return any((folder / _OWN).is_dir() for folder in session.parents)


class Refused(UsageError):
    """A piece or a session that is not taken, with the status of HTTP that says so."""

    def __init__(self, status: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


class Missing(Refused):
    """A session is to be put together of content that is not here."""

    def __init__(self, digests: Mapping[str, int]) -> None:
        super().__init__(409, f"{len(digests)} of the session's files are not here yet")
        self.digests = digests


@dataclass(frozen=True)
class Stored:
    """A session that is here."""

    folder: Path
    new: bool  # False: it was here already


class PublishedStore:
    """What was published to one folder. Safe to use from many threads.

    Args:
        folder: made when the first piece comes.
        most: bytes that all of it may take.
    """

    def __init__(self, folder: Path, most: int = MOST_BYTES) -> None:
        self.folder = folder
        self._most = most
        self._own = folder / _OWN
        self._lock = threading.Lock()
        self._used: int | None = None  # bytes of blobs and pieces; None until they are counted

    def missing(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Of digests with their sizes those whose content is not here -> how many bytes of it are."""
        with self._lock:
            return {
                digest: min(_size(self._partial(digest)), size)
                for digest, size in sizes.items()
                if _size(self._blob(digest), -1) != size
            }

    def put(self, digest: str, offset: int, size: int, data: bytes) -> int:
        """Add a piece of a content; returns how many bytes of it are here. It counts once all of it is verified.

        Raises:
            Refused: the piece does not follow what is here, or no room is left, or the content is not what it says.
            StorageError: the disk is full, or cannot be written.
        """
        check(digest)
        if not (0 <= offset <= offset + len(data) <= size <= MOST_SESSION) or (size and not data):
            raise Refused(400, "that is no piece of the file")
        with self._lock, storing(self.folder, _OPTION):
            self._prepare()
            partial, blob = self._partial(digest), self._blob(digest)
            if _size(blob, -1) == size:
                return size
            have = _size(partial)
            if offset != have:
                raise Refused(409, f"{have} bytes of it are here", hint=str(have))
            self._make_room(len(data), is_new=not have)
            with os.fdopen(
                os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600), "ab"
            ) as file:
                file.write(data)
                if have + len(data) == size:
                    file.flush()
                    os.fsync(file.fileno())
            self._used = (self._used or 0) + len(data)
            have += len(data)
            if have == size:
                if digest_file(partial, algorithm_of(digest)) != digest:
                    self._drop(partial)
                    raise Refused(422, "what was sent is not what its digest says", hint="was it written meanwhile?")
                partial.chmod(0o444)
                partial.replace(blob)
            return have

    def finish(self, parcel: Parcel) -> Stored:
        """Put a session together of what is here; it appears as a whole.

        Raises:
            Missing: some of its content is not here.
            Refused: it is no stored session, or another one of that name is here.
            StorageError: it cannot be written.
        """
        if not any(one.name in RECORDS for one in parcel.files):
            raise Refused(400, "that is no stored session: it has no record", hint=f"one of {', '.join(RECORDS)}")
        target = self.folder / parcel.id
        with self._lock, storing(self.folder, _OPTION):
            self._prepare()
            if target.is_symlink() or target.exists():
                if target.is_symlink() or not _is_same(target, parcel):
                    raise Refused(
                        409, f"another session {parcel.id!r} is here", hint="--as NAME publishes it as another"
                    )
                return Stored(target, new=False)
            if absent := self._absent(parcel):
                raise Missing(absent)
            staging = self._own / "staging" / secrets.token_hex(8)
            try:
                for one in parcel.files:
                    place = staging / one.name
                    place.parent.mkdir(parents=True, exist_ok=True)
                    self._place(one, place)
                staging.rename(target)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
        return Stored(target, new=True)

    def _absent(self, parcel: Parcel) -> dict[str, int]:
        """The content that is not here, or is not what it was any more: then it is dropped."""
        absent = {}
        for digest, size in {one.digest: one.size for one in parcel.files}.items():
            blob = self._blob(digest)
            found = _size(blob, -1)
            if found >= 0 and (found != size or digest_file(blob, algorithm_of(digest)) != digest):
                self._drop(blob)
                found = -1
            if found < 0:
                absent[digest] = 0
        return absent

    def _place(self, one: FileEntry, place: Path) -> None:
        try:
            os.link(self._blob(one.digest), place)
        except OSError:  # a file system without links, or a file with too many
            shutil.copyfile(self._blob(one.digest), place)
            place.chmod(0o444)

    def _make_room(self, more: int, *, is_new: bool) -> None:
        self._used = self._count() if self._used is None else self._used
        partials = list((self._own / "partial").iterdir()) if is_new else []
        free = shutil.disk_usage(self.folder).free
        if self._used + more > self._most or len(partials) >= _MOST_PARTIAL or free < LEAVE_FREE + more:
            self._clean()
            self._used = self._count()
            free = shutil.disk_usage(self.folder).free
        if self._used + more > self._most:
            raise Refused(
                507, f"all that is published may have {self._most / 1e9:.1f} GB", hint="delete sessions there"
            )
        if is_new and len(list((self._own / "partial").iterdir())) >= _MOST_PARTIAL:
            raise Refused(507, f"{_MOST_PARTIAL} files are being sent already", hint="try again later")
        if free < LEAVE_FREE + more:
            raise Refused(507, "the server's disk is full", hint="make room there")

    def _clean(self) -> None:
        """Delete what nobody needs: content that no session has any more, and what was never sent to its end."""
        before = time.time() - KEEP_S
        for kind in ("blobs", "partial", "staging"):
            for path in (self._own / kind).iterdir():
                found = path.lstat()
                if found.st_mtime < before and (kind != "blobs" or found.st_nlink == 1):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def _count(self) -> int:
        return sum(path.lstat().st_size for kind in ("blobs", "partial") for path in (self._own / kind).iterdir())

    def _drop(self, path: Path) -> None:
        self._used = None
        path.unlink(missing_ok=True)

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for folder in (self._own, *(self._own / kind for kind in ("blobs", "partial", "staging"))):
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.is_symlink():
                raise Refused(409, f"{folder.name} is a link", hint="remove it")

    def _blob(self, digest: str) -> Path:
        return self._own / "blobs" / check(digest).replace(":", "-")

    def _partial(self, digest: str) -> Path:
        return self._own / "partial" / check(digest).replace(":", "-")


def _size(path: Path, absent: int = 0) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return absent


def _is_same(folder: Path, parcel: Parcel) -> bool:
    """Whether a folder holds a session's files and, hidden ones apart, no others."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if not path.is_dir()}
    shown = {name for name in found if not any(part.startswith(".") for part in name.split("/"))}
    return shown == {one.name for one in parcel.files} and all(
        not found[one.name].is_symlink()
        and _size(found[one.name], -1) == one.size
        and digest_file(found[one.name], algorithm_of(one.digest)) == one.digest
        for one in parcel.files
    )

"""Limit the disk space for mirrored results.

Bytes are counted before writing, so that no farm can exceed the limit.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from hil.controller.web.files.quota import INODE_BYTES, NAME_BYTES, count_bytes, has_room
from hil.errors import StorageError, UsageError


class NoRoom(StorageError):
    """The directory for copies of farm results is full."""


class DiskFull(StorageError):
    """The disk has too little free space for more copies of farm results."""


class TooLarge(UsageError):
    """The submission exceeds the limit for a single submission."""


class MirrorRoom:
    """A directory's disk space.

    A submission may use at most half of the space, so that one submission cannot displace all others.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self._used = self._taken = 0
        self._lock = threading.Lock()

    @property
    def is_half_free(self) -> bool:
        """True if a submission with the maximum size fits."""
        return self._used <= self._most // 2

    def begin(self) -> None:
        """Start counting a new submission."""
        self.measure()
        self._taken = 0

    def take(self, size: int) -> None:
        """Count bytes before they are written.

        Raises:
            NoRoom: the directory's limit is exceeded.
            TooLarge: the submission's limit is exceeded.
            DiskFull: the disk has too little free space.
        """
        with self._lock:
            self._taken += size
            self._used += size
            if self._taken > self._most // 2:
                raise TooLarge("the results of the submission exceed the mirror's limit")
            if self._used > self._most:
                raise NoRoom("no space left for copies of farm results")
        self.check_disk(size)

    def take_name(self) -> None:
        """Count a directory entry."""
        self.take(NAME_BYTES)

    def take_inode(self) -> None:
        """Count a new file without its contents, or a new directory."""
        self.take(NAME_BYTES + INODE_BYTES)

    def check_disk(self, more: int = 0) -> None:
        """Raise DiskFull unless the disk has space for ``more`` bytes and a reserve."""
        if not has_room(self._folder, more):
            raise DiskFull(
                f"too little free space for copies of farm results in {self._folder}", hint="free disk space"
            )

    def measure(self) -> None:
        """Measure the directory's space, counted as in :mod:`.quota`. Hard links count once."""
        used, seen = 0, set[int]()
        for at, folders, files in os.walk(self._folder):
            for name in (*folders, *files):
                with contextlib.suppress(OSError):
                    status = Path(at, name).lstat()
                    used += NAME_BYTES
                    if status.st_ino not in seen:
                        seen.add(status.st_ino)
                        used += count_bytes(status.st_size)
        with self._lock:
            self._used = used

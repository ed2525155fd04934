"""Limit the disk space for mirrored results.

Bytes are counted before writing, so that no farm can exceed the limit.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from hil.errors import StorageError, UsageError

# Overhead per file: rounding up to blocks, and the directory entry.
_BLOCK, _ENTRY = 4096, 512


class NoRoom(StorageError):
    """The directory for copies of farm results is full."""


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
        """
        with self._lock:
            self._taken += size
            self._used += size
            if self._taken > self._most // 2:
                raise TooLarge("the results of the submission exceed the mirror's limit")
            if self._used > self._most:
                raise NoRoom("no space left for copies of farm results")

    def take_entry(self) -> None:
        """Count a directory entry and the maximum loss from rounding up to blocks."""
        self.take(_ENTRY + _BLOCK)

    def measure(self) -> None:
        """Measure the directory's space in whole blocks and entries. Hard links count once."""
        used, seen = 0, set[int]()
        for at, folders, files in os.walk(self._folder):
            for name in (*folders, *files):
                with contextlib.suppress(OSError):
                    status = Path(at, name).lstat()
                    used += _ENTRY
                    if status.st_ino not in seen:
                        seen.add(status.st_ino)
                        used += -(-status.st_size // _BLOCK) * _BLOCK
        with self._lock:
            self._used = used

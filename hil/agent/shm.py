"""A growing piece of memory that two processes share.

An unlinked file, so that nothing is left behind whoever is killed: a memfd where there is one (no size limit of a
tmpfs mount applies), else a temporary file. The descriptor is handed to the other process, which maps it for itself.
"""

from __future__ import annotations

import mmap
import os
import tempfile

from hil.errors import RunFailed

_ROUND = 1 << 16
ALIGN = 64


def aligned(size: int) -> int:
    """A size rounded up to where the next tensor may start."""
    return (size + ALIGN - 1) // ALIGN * ALIGN


class Arena:
    """Shared memory behind a descriptor; either side may grow it and the other maps what is there."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = _anonymous_file() if fd is None else fd
        self._map: mmap.mmap | None = None

    def view(self, size: int, *, grow: bool) -> memoryview:
        """The first ``size`` bytes.

        Args:
            size: bytes needed.
            grow: make the file as large as needed; otherwise it must be already.

        Raises:
            RunFailed: there is not so much memory, or the other side's file is shorter than it said.
        """
        if size == 0:
            return memoryview(bytearray())
        if self._map is None or len(self._map) < size:
            try:
                actual = os.fstat(self.fd).st_size
                if actual < size:
                    if not grow:
                        raise RunFailed(f"{size} bytes of tensors were announced, {actual} are there")
                    actual = (size + _ROUND - 1) // _ROUND * _ROUND
                    os.ftruncate(self.fd, actual)
                # Views of the old map may still be alive: it is dropped, not closed.
                self._map = mmap.mmap(self.fd, actual)
            except (OSError, ValueError, OverflowError) as error:
                raise RunFailed(f"no memory for {size} bytes of tensors: {error}") from error
        return memoryview(self._map)[:size]

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last view of it."""
        self._map = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hil")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())

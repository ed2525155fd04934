"""A growing piece of memory that two processes share.

An unlinked file, so that nothing is left behind whoever is killed: a memfd where there is one (no size limit of a
tmpfs mount applies), else a temporary file. The descriptor is handed to the other process, which maps it for itself.

A memfd is sealed so that it only grows: whoever reads memory that a file no longer has is killed by SIGBUS, and the
worker, which has the descriptor as well, runs programs that may mean harm. A temporary file cannot be sealed: there
(macOS, Linux before 3.17) a program that cuts it ends the agent.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile

from hil.errors import RunFailed

_ROUND = 1 << 16
ALIGN = 64


def aligned(size: int) -> int:
    """A size rounded up to where the next tensor may start."""
    return (size + ALIGN - 1) // ALIGN * ALIGN


class Arena:
    """Shared memory behind a descriptor; either side may grow it and the other maps what it needs of it."""

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
                wanted = (size + _ROUND - 1) // _ROUND * _ROUND
                if actual < size:
                    if not grow:
                        raise RunFailed(f"{size} bytes of tensors were announced, {actual} are there")
                    actual = wanted
                    os.ftruncate(self.fd, actual)
                # Not the whole file, which may be of any size. Views of the old map may still be alive: it is dropped,
                # not closed.
                self._map = mmap.mmap(self.fd, min(actual, wanted))
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
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError):  # of a kernel that has none
            fd = os.memfd_create("hil", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # And no seal more: one against growing or writing would be the other side's to set.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            return fd
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())

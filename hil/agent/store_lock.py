"""Lock a store's directory for one agent."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from hil.core.disk_faults import FAULTS, make_disk_error
from hil.errors import HilError, UsageError

# Errors of a file system without locks. There, the user must give each agent a separate directory.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def store_error(error: OSError, root: Path) -> HilError:
    """Return the error for a store that cannot be opened: a disk fault or an invalid directory."""
    if error.errno in FAULTS:
        return make_disk_error(error, root)
    return UsageError(f"the store {root} cannot be used: {error.strerror}")


class StoreLock:
    """Lock of a store for one agent, until :meth:`release` or the end of the process.

    Raises:
        UsageError: a different agent has the lock, or the directory is not usable.
        BoardUnfit: the disk is full, faulty or read-only.
    """

    def __init__(self, root: Path) -> None:
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Not inheritable: a worker that outlives a killed agent must not keep the lock.
            self._file = os.fdopen(os.open(root / "lock", os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
        except OSError as error:
            raise store_error(error, root) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return
            owner = os.pread(self._file.fileno(), 20, 0).decode(errors="replace")
            self.release()
            raise UsageError(
                f"the store {root} is already in use by an agent{owner and f' (process {owner})'}",
                hint="stop that agent, or use a different --store",
            ) from error
        self._file.truncate(0)
        self._file.write(str(os.getpid()).encode())

    def release(self) -> None:
        """Release the lock."""
        self._file.close()

"""One agent a store: the lock that an agent holds on its folder."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from hil.errors import UsageError

# A file system without locks: there, keeping agents apart is left to whoever starts them.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class StoreLock:
    """Keeps a store to one agent, from now until :meth:`release` or the agent's end, however that comes.

    Args:
        root: the store's folder, made if needed.

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

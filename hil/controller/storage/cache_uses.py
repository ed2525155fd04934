"""Who uses what of the cache, so that cleaning it takes nothing away from a run that is under way."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path


class Uses:
    """The keys that one user of a cache has in use, in a file that is locked for as long as he lives.

    The system takes the lock away when a process ends, however it ends: a file without one is a leftover.

    Args:
        root: the cache's folder.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root / "users"
        self._gate = root / "users.lock"
        self._name = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._keys: set[str] = set()
        self._file: int | None = None

    def add(self, key: str) -> None:
        """Have a key in use from now on. Where the cache cannot be written, nobody is told."""
        with self._lock, contextlib.suppress(OSError):
            if key not in self._keys:
                self._file = self._open() if self._file is None else self._file
                with self._through_gate(fcntl.LOCK_SH):
                    os.write(self._file, f"{key}\n".encode())
                self._keys.add(key)

    @contextlib.contextmanager
    def nobody_new(self) -> Iterator[set[str]]:
        """What others have in use (:meth:`of_others`), to which nobody adds until this is left."""
        with self._through_gate(fcntl.LOCK_EX):
            yield self.of_others()

    def of_others(self) -> set[str]:
        """The keys that others have in use; what dead ones left behind is removed."""
        found: set[str] = set()
        for path in self._folder.glob("[0-9a-f]*"):
            if path.name != self._name:
                with contextlib.suppress(FileNotFoundError), path.open() as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        found.update(file.read().split())
                    else:
                        path.unlink()
        return found

    @contextlib.contextmanager
    def _through_gate(self, how: int) -> Iterator[None]:
        file = os.open(self._gate, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, how)
            yield
        finally:
            os.close(file)

    def _open(self) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        # It gets the name that others look at when it is locked: unlocked it would be a leftover to them.
        made = self._folder / f".{self._name}"
        file = os.open(made, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        fcntl.flock(file, fcntl.LOCK_EX)
        path = made.rename(self._folder / self._name)
        weakref.finalize(self, _leave, file, path)
        return file


def _leave(file: int, path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
    with contextlib.suppress(OSError):
        os.close(file)

"""Boards that several processes of one test run share: one at a time uses each, first come first served."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from hil.core.digest import digest_of

_LOOK_S = 0.02


class Turns:
    """Turns on boards of one kind, any of which will do.

    A turn is a locked file, so it ends with its process. Who waits leaves a ticket; only the oldest ticket's owner
    tries the locks, so nobody is passed over however short the others' pauses are.

    Args:
        folder: all processes' own; it is there.
        boards: the boards' names.
    """

    def __init__(self, folder: Path, boards: Sequence[str]) -> None:
        import filelock

        self._folder = folder / _file_name("\n".join(sorted(boards)))
        self._folder.mkdir(exist_ok=True)
        # Another thread than the one that took a turn may end it.
        self._locks = {
            board: filelock.FileLock(self._folder / f"{_file_name(board)}.lock", thread_local=False) for board in boards
        }

    def take(self, boards: Sequence[str]) -> str:
        """Wait for a turn; returns the board it is on, the first of these that is free."""
        import filelock

        ticket = self._folder / f"{time.time_ns():020d}-{os.getpid()}.ticket"
        ticket.touch()
        try:
            while True:
                if self._waiting()[:1] == [ticket.name]:
                    for board in boards:
                        try:
                            self._locks[board].acquire(timeout=0)
                        except filelock.Timeout:
                            continue
                        return board
                time.sleep(_LOOK_S)
        finally:
            ticket.unlink(missing_ok=True)

    def end(self, board: str) -> None:
        """The turn on a board is over."""
        self._locks[board].release()

    def wanted(self) -> bool:
        """Whether anybody waits for a turn."""
        return bool(self._waiting())

    def _waiting(self) -> list[str]:
        """The tickets of the living, the oldest first."""
        found = []
        for ticket in sorted(self._folder.glob("*.ticket")):
            if _lives(int(ticket.stem.rpartition("-")[2])):
                found.append(ticket.name)
            else:
                ticket.unlink(missing_ok=True)
        return found


def _file_name(text: str) -> str:
    return digest_of(text.encode()).partition(":")[2][:16]


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True

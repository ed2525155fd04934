"""Manage the boards of a test process.

Boards open on demand, stay open, and are released when other processes wait for them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hil.controller.devices.board_choice import BoardChoice, is_provider_address, knows_target
from hil.controller.pipeline.boards.board_pool import BoardPool
from hil.controller.pipeline.boards.board_session import BoardSession
from hil.core.board_config import BoardConfig
from hil.core.digest import digest_of
from hil.errors import BoardError

_POLL_SECONDS = 0.02


class BoardLocks:
    """Exclusive locks on boards that can replace each other.

    A lock is a locked file, so it is released when its process ends. A waiting process creates a ticket. Only the
    process with the oldest ticket tries the locks, so no process starves. All processes share ``folder``.
    """

    def __init__(self, folder: Path, boards: Sequence[str]) -> None:
        import filelock

        self._folder = folder / _make_file_name("\n".join(sorted(boards)))
        self._folder.mkdir(exist_ok=True)
        # A lock may be released by a different thread than the one that acquired it.
        self._locks = {
            board: filelock.FileLock(self._folder / f"{_make_file_name(board)}.lock", thread_local=False)
            for board in boards
        }

    def take(self, boards: Sequence[str]) -> str:
        """Wait for a lock on the first free board, and return the board's name."""
        import filelock

        ticket = self._folder / f"{time.time_ns():020d}-{os.getpid()}.ticket"
        ticket.touch()
        try:
            while True:
                if self._list_tickets()[:1] == [ticket.name]:
                    for board in boards:
                        try:
                            self._locks[board].acquire(timeout=0)
                        except filelock.Timeout:
                            continue
                        return board
                time.sleep(_POLL_SECONDS)
        finally:
            ticket.unlink(missing_ok=True)

    def end(self, board: str) -> None:
        """Release the lock on a board."""
        self._locks[board].release()

    def is_wanted(self) -> bool:
        """Return True if a process waits for a lock."""
        return bool(self._list_tickets())

    def _list_tickets(self) -> list[str]:
        """Return the tickets of running processes, oldest first."""
        found = []
        for ticket in sorted(self._folder.glob("*.ticket")):
            if _is_running(int(ticket.stem.rpartition("-")[2])):
                found.append(ticket.name)
            else:
                ticket.unlink(missing_ok=True)
        return found


def _make_file_name(text: str) -> str:
    return digest_of(text.encode()).partition(":")[2][:16]


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


# Minimum time before a process releases a board for other processes, because reconnecting takes as long as a few cases.
_TURN_SECONDS = 2.0
_LOOK_SECONDS = 0.1


class BoardLender:
    """Boards of a hardware type, and the board that this process uses now.

    Without locks, no other process uses these boards.
    """

    def __init__(
        self,
        choices: Sequence[BoardChoice],
        runtimes: Sequence[str],
        pool: BoardPool,
        locks: BoardLocks | None,
        faults: Sequence[str] = (),
    ) -> None:
        configs = [choice.config for choice in choices]
        alike = all(one.compile_flags == configs[0].compile_flags for one in configs)
        self._known = {runtime: alike and knows_target(configs[0], runtime) for runtime in runtimes}
        self._config = configs[0]
        self.choices = {choice.name: choice for choice in choices}
        self._pool = pool
        self._runtimes = tuple(runtimes)
        self._locks = locks
        self._faults = tuple(faults)
        # Boards in order of preference. A lost board moves to the end.
        self._order = list(self.choices)
        self._mutex = threading.RLock()
        self._name = ""
        self._session: BoardSession | None = None
        self._users = 0
        self._since = 0.0
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None

    def choose_config(self, runtime: str) -> BoardConfig | None:
        """Return the board config that a runtime's programs are compiled for.

        Returns None if the compile targets of the boards differ, or if only the board knows its target. The caller must
        then borrow a board first.
        """
        return self._config if self._known[runtime] else None

    @contextlib.contextmanager
    def borrow_board(self, boards: Sequence[str] = ()) -> Iterator[BoardSession]:
        """Borrow a board for exclusive use in the context. Nested calls return the same board.

        Args:
            boards: names of the boards to choose from; empty for all. Ignored in a nested call.

        Raises:
            UsageError: the board does not support this use.
            BoardError: the board is not available. The next call tries again.
        """
        with self._mutex:
            if boards and self._name not in boards and not self._users:
                self._give_back()
            session = self._session or self._take_board(boards)
            self._users += 1
        try:
            yield session
        finally:
            with self._mutex:
                self._users -= 1
                self._release_if_wanted()

    def reconnect(self, error: BoardError) -> None:
        """Reconnect to the lost board, and add the result to the error."""
        with self._mutex:
            if self._session is not None:
                self._session = self._pool.reconnect(self.choices[self._name], error, faults=self._faults)
            if self._session is None:
                self._demote_board()

    def release(self) -> None:
        """Release the board for other processes unless it is in use."""
        with self._mutex:
            if not self._users:
                self._give_back()

    def close(self) -> None:
        """Release the board and stop the watcher."""
        self._over.set()
        with self._mutex:
            self._give_back()
        if self._watcher is not None:
            self._watcher.join()

    def _take_board(self, boards: Sequence[str] = ()) -> BoardSession:
        order = [name for name in self._order if not boards or name in boards]
        # If the board was lost while it was borrowed, this process still has its lock.
        if not self._name:
            self._name = self._locks.take(order) if self._locks else order[0]
        try:
            self._session = self._pool.session(self.choices[self._name], runtimes=self._runtimes, faults=self._faults)
            self._check_target(self._session.board.config)
        except BaseException:
            self._demote_board()
            self._give_back()
            raise
        if not all(self._known.values()) and len(self.choices) == 1:
            self._config = self._session.board.config
            self._known = dict.fromkeys(self._runtimes, True)
        self._since = time.monotonic()
        if self._locks and self._watcher is None:
            self._watcher = threading.Thread(target=self._watch_waiters, name="hil-board-locks", daemon=True)
            self._watcher.start()
        return self._session

    def _check_target(self, config: BoardConfig) -> None:
        """Reject a board lent by a farm if its programs differ from the programs of the previous board."""
        lent = is_provider_address(self.choices[self._name].config.connection.address)
        if lent and all(self._known.values()) and self._config.compile_flags != config.compile_flags:
            raise BoardError(
                f"the leased board needs different compile flags than the previous leased board, {self._config.name}",
                board=config.name,
                hint="use a narrower selector, so that the farm leases boards of the same kind",
            )

    def _demote_board(self) -> None:
        self._order.sort(key=lambda name: name == self._name)

    def _release_if_wanted(self) -> None:
        """Release an unused board if other processes have waited long enough."""
        if self._users or not self._name:
            return
        if self._session is None or (
            self._locks and time.monotonic() - self._since >= _TURN_SECONDS and self._locks.is_wanted()
        ):
            self._give_back()

    def _give_back(self) -> None:
        name = self._name
        self._session, self._name = None, ""
        try:
            if name:
                self._pool.give_back(self.choices[name], faults=self._faults)
        finally:
            if name and self._locks:
                self._locks.end(name)

    def _watch_waiters(self) -> None:
        """Release the board while this process waits for a test or compiles, so that others can use it."""
        while not self._over.wait(_LOOK_SECONDS):
            # While a board is opened or reconnected, the mutex is locked. Then no board can be released.
            if self._mutex.acquire(blocking=False):
                try:
                    self._release_if_wanted()
                finally:
                    self._mutex.release()

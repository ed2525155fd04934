"""Manage the boards of a workload. Only this module opens, reconnects and closes boards."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import TARGET_SECONDS, BoardChoice, pin_choice, refuse_missing_device
from hil.controller.devices.choosing.board_factory import open_board, reconnect
from hil.controller.devices.console.board_console import BoardConsole, open_console
from hil.controller.pipeline.boards.board_session import BoardSession
from hil.controller.records.console import StoredConsole
from hil.controller.storage.runs import make_safe_name
from hil.core.board_config import BoardConfig
from hil.core.text import TextSink
from hil.errors import BoardError, BoardLost, BoardUnfit

# Directory of a record with the boards' console lines.
CONSOLES = "consoles"


@dataclass(frozen=True)
class _BoardKey:
    """What requests for the same session have in common."""

    board: str
    config_path: Path
    devices: tuple[tuple[str, str], ...]
    faults: tuple[str, ...]


@dataclass
class _PoolEntry:
    """State of a requested board."""

    choice: BoardChoice
    runtimes: tuple[str, ...]
    faults: tuple[str, ...]
    session: BoardSession | None = None
    console: BoardConsole | None = None
    console_file: str = ""
    mutex: threading.RLock = field(default_factory=threading.RLock)


class BoardPool:
    """Pool of boards. The first request opens a board, which then stays open. Context manager; thread-safe.

    Args:
        timeout_s: Time limit in seconds for a package's choice of the compile target.
        opened: Called with each board after opening, before the first use. If the function raises, the pool closes the
            board.
        most_loaded: Maximum number of programs that stay loaded on a board between runs.
        record_folder: Directory of the run's record, for the boards' console lines; None stores no lines.
        needs_device: Raise an error if a board lacks the device of its config. False for use without programs.
    """

    def __init__(
        self,
        purpose: str,
        *,
        wait_s: float = 60.0,
        timeout_s: float = TARGET_SECONDS,
        say: TextSink = lambda text: None,
        opened: Callable[[Board], None] = lambda board: None,
        most_loaded: int = 0,
        record_folder: Path | None = None,
        needs_device: bool = True,
    ) -> None:
        self._purpose = purpose
        self._wait_s, self._timeout_s = wait_s, timeout_s
        self._say = say
        self._opened = opened
        self._most_loaded = most_loaded
        self._record_folder = record_folder
        self._needs_device = needs_device
        self._consoles: list[StoredConsole] = []  # of closed boards
        self._entries: dict[_BoardKey, _PoolEntry] = {}
        self._mutex = threading.Lock()
        self._closed = False

    def session(
        self, choice: BoardChoice, *, runtimes: Sequence[str] = ("",), faults: Sequence[str] = ()
    ) -> BoardSession:
        """Return the session of a board, opening the board if necessary.

        A farm may choose any of its boards for the first connection. Later connections use the same board.

        A session uses one device of each runtime, and a board has one session at a time. So a request with other
        devices closes the session of this board. Simulators stay open.

        Args:
            runtimes: Runtimes to use on the board; "" is the runtime of the board's config. hil installs only the
                runtimes of the first request on a board with SSH.
            faults: Faults of a simulator. Requests with different faults or devices get different boards.

        Raises:
            UsageError: the board does not support this use.
            BoardError: the board is not available.
        """
        entry = self._get_entry(choice, runtimes, faults)
        with entry.mutex:
            if entry.session is None:
                self._give_back_other_devices(choice, faults)
                self._start_session(entry, self._open_board(entry))
            assert entry.session is not None
            if more := tuple(name for name in dict.fromkeys(runtimes) if name not in entry.runtimes):
                self._add_targets(entry.session.board, more)
                entry.runtimes += more
            return entry.session

    def reconnect(self, choice: BoardChoice, error: BoardError, *, faults: Sequence[str] = ()) -> BoardSession | None:
        """Reconnect to a lost board if it returns soon. Add the result to the error.

        This method does not run a program again. It waits only for boards with SSH. For other boards, the next request
        for a session opens a new connection. A board that is unfit (BoardUnfit) still responds, so its session is
        returned.
        """
        entry = self._get_entry(choice, ("",), faults)
        with entry.mutex:
            if isinstance(error, BoardUnfit):
                return entry.session
            session, entry.session = entry.session, None
            if session is None:
                return None
            session.forget()
            board = reconnect(session.board, error, lambda: self._open_board(entry))
            if board is not None:
                self._start_session(entry, board)
            return entry.session

    def is_open(self, choice: BoardChoice, *, faults: Sequence[str] = ()) -> bool:
        """Return True if a board is open."""
        entry = self._entries.get(_make_board_key(choice, faults))
        return entry is not None and entry.session is not None

    @property
    def any_open(self) -> bool:
        """True if any board is open."""
        return any(entry.session is not None for entry in list(self._entries.values()))

    def give_back(self, choice: BoardChoice, *, faults: Sequence[str] = ()) -> None:
        """Close a board if it is open."""
        self._give_back(_make_board_key(choice, faults))

    def _give_back(self, key: _BoardKey) -> None:
        with self._mutex:
            entry = self._entries.pop(key, None)
        if entry is not None:
            session, entry.session = entry.session, None
            try:
                if session is not None:
                    session.close()
            finally:
                self._close_console(entry)

    def _give_back_other_devices(self, choice: BoardChoice, faults: Sequence[str]) -> None:
        """Close the session of the same board with other devices."""
        if choice.config.is_simulator:
            return
        key = _make_board_key(choice, faults)
        with self._mutex:
            others = [one for one in self._entries if one != key and replace(one, devices=choice.devices) == key]
        for other in others:
            self._give_back(other)

    def close(self) -> None:
        """Close all boards. Further boards cannot be opened. May be called from any thread."""
        with self._mutex:
            self._closed = True
            entries, self._entries = list(self._entries.values()), {}
        with contextlib.ExitStack() as stack:
            for entry in entries:
                stack.callback(self._close_console, entry)
            for entry in entries:
                # Boards of this thread are idle. Other threads may still use theirs; closing ends this use.
                if entry.session is not None:
                    stack.callback(entry.session.close)

    def _get_entry(self, choice: BoardChoice, runtimes: Sequence[str], faults: Sequence[str]) -> _PoolEntry:
        with self._mutex:
            if self._closed:
                raise BoardLost("the boards were released", board=choice.name)
            return self._entries.setdefault(
                _make_board_key(choice, faults),
                _PoolEntry(choice, tuple(dict.fromkeys(runtimes)) or ("",), tuple(faults)),
            )

    def save_consoles(self, *, is_last: bool = False) -> list[StoredConsole]:
        """Write the boards' console lines to the record's directory. Return the consoles for the record.

        Args:
            is_last: also write the lines of the last seconds.

        Raises StorageError.
        """
        with self._mutex:
            entries, closed = list(self._entries.values()), list(self._consoles)
        return [
            *closed,
            *(found for entry in entries if (found := self._save_console(entry, is_last=is_last)) is not None),
        ]

    def _save_console(self, entry: _PoolEntry, *, is_last: bool = False) -> StoredConsole | None:
        if entry.console is None or self._record_folder is None:
            return None
        board = entry.console.board
        if not entry.console_file:
            ends = chain([""], (f"-{number}" for number in count(2)))
            names = (f"{CONSOLES}/{make_safe_name(board)}{end}.jsonl" for end in ends)
            entry.console_file = next(name for name in names if not (self._record_folder / name).exists())
        return entry.console.save(self._record_folder, entry.console_file, board, is_last=is_last)

    def _open_console(self, entry: _PoolEntry, config: BoardConfig) -> None:
        if entry.console is None:
            entry.console = open_console(config, self._say)

    def _close_console(self, entry: _PoolEntry) -> None:
        if entry.console is not None:
            entry.console.close()
            stored = self._save_console(entry, is_last=True)
            with self._mutex:
                entry.console = None
                if stored is not None:
                    self._consoles.append(stored)

    def _open_board(self, entry: _PoolEntry) -> Board:
        self._open_console(entry, entry.choice.config)
        first, *others = entry.runtimes
        board = self._connect_for_runtime(entry, first)
        for runtime in others:
            if board.shell is None:
                break
            # Connect again for each further runtime. Each connection installs an agent with the runtime, and keeps
            # other runtimes.
            board.close()
            board = self._connect_for_runtime(entry, runtime)
        try:
            if board.config.console.farm:  # known only after the lease; other links would run on this machine
                self._open_console(entry, board.config)
            self._add_targets(board, entry.runtimes)
            self._opened(board)
        except BaseException:
            board.close()
            raise
        # For a selector, a farm chose this board. Later connections must use the same board.
        entry.choice = pin_choice(entry.choice, board.name)
        return board

    def _add_targets(self, board: Board, runtimes: Sequence[str]) -> None:
        """Add the compile targets of runtimes. Raises BoardUnfit if the board lacks the device of a runtime."""
        for runtime in runtimes if self._needs_device else ():
            refuse_missing_device(board.config, runtime, board.info, board.name)
        for runtime in runtimes:
            board.add_target(runtime)

    def _connect_for_runtime(self, entry: _PoolEntry, runtime: str) -> Board:
        how: dict[str, Any] = {"purpose": self._purpose, "wait_s": self._wait_s, "timeout_s": self._timeout_s}
        choice = replace(entry.choice, runtime=runtime, faults=entry.faults, say=self._say, **how)
        return open_board(choice, console=entry.console)

    def _start_session(self, entry: _PoolEntry, board: Board) -> None:
        with self._mutex:
            if not self._closed:
                entry.session = BoardSession(board, self._most_loaded, entry.console)
                return
        board.close()
        raise BoardLost("the boards were released", board=board.name)

    def __enter__(self) -> BoardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _make_board_key(choice: BoardChoice, faults: Sequence[str]) -> _BoardKey:
    return _BoardKey(choice.name, choice.config.path, choice.devices, tuple(faults))

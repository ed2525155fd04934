"""The boards of a workload, with the programs that stay loaded on them: the one place where boards are opened, found
again and given back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hil.controller.devices.board import Board, LoadedProgram
from hil.controller.devices.board_choice import BoardChoice, pinned
from hil.controller.devices.board_factory import open_board, reconnect
from hil.core.results import Artifact
from hil.core.text import TextSink
from hil.errors import BoardError, BoardLost, HilError


class BoardSession:
    """A board, and programs that are loaded on it: ``most_loaded`` between runs; 0 unloads each after its run."""

    def __init__(self, board: Board, most_loaded: int = 0) -> None:
        self.board = board
        self._most_loaded = most_loaded
        self._loaded: dict[Hashable, LoadedProgram] = {}
        # What made loading a program fail would for its next run too.
        self._failed: tuple[Hashable, HilError] | None = None

    def load(
        self,
        artifact: Artifact,
        *,
        timeout: float,
        no_fallback: bool = False,
        check: Callable[[LoadedProgram], None] = lambda program: None,
    ) -> tuple[LoadedProgram, bool]:
        """Load a pushed program (see :meth:`Board.load`), or take one that stayed loaded; whether it was loaded now.

        ``check`` looks at what was loaded; what it raises counts as an error of loading.
        """
        key = _key(artifact)
        if self._failed is not None and self._failed[0] == key:
            raise self._failed[1]
        if key in self._loaded:
            return self._loaded[key], False
        while self._loaded and len(self._loaded) >= max(self._most_loaded, 1):
            self._loaded.pop(next(iter(self._loaded))).unload()
        try:
            program = self.board.load(artifact, timeout=timeout, no_fallback=no_fallback)
            self._loaded[key] = program
            check(program)
        except BoardError:
            raise
        except HilError as error:
            if self._most_loaded:
                self._failed = key, error
            raise
        return program, True

    def has(self, artifact: Artifact) -> bool:
        """Whether a program is loaded."""
        return _key(artifact) in self._loaded

    def after_run(self, artifact: Artifact, *, broken: bool) -> None:
        """Unload a program that has run, unless it may stay loaded; one that crashed or hung is ``broken``."""
        if broken:
            self._failed = None
        elif self._most_loaded:
            return
        self.unload(artifact)

    def unload(self, artifact: Artifact) -> None:
        """Unload a program, if it is loaded."""
        if (program := self._loaded.pop(_key(artifact), None)) is not None:
            program.unload()

    def close(self) -> None:
        """Unload everything and give the board back."""
        loaded, self._loaded = list(self._loaded.values()), {}
        try:
            for program in loaded:
                program.unload()
        finally:
            self.board.close()

    def forget(self) -> None:
        """The board is lost, and what was loaded with it."""
        self._loaded.clear()


def _key(artifact: Artifact) -> Hashable:
    # By all files, for weights may lie beside the main one.
    return (*sorted(artifact.digests.items()), artifact.function)


@dataclass
class _Entry:
    """What is known of a board that was asked for."""

    choice: BoardChoice
    runtimes: tuple[str, ...]
    faults: tuple[str, ...]
    session: BoardSession | None = None
    mutex: threading.RLock = field(default_factory=threading.RLock)


class BoardPool:
    """Boards, each opened when it is first asked for and kept until the end. A context manager. Thread-safe.

    Args:
        opened: called with each board that was opened, before anybody gets it; what it raises closes the board.
        most_loaded: how many programs stay loaded on a board between runs.
    """

    def __init__(
        self,
        purpose: str,
        *,
        wait_s: float = 60.0,
        say: TextSink = lambda text: None,
        opened: Callable[[Board], None] = lambda board: None,
        most_loaded: int = 0,
    ) -> None:
        self._purpose = purpose
        self._wait_s = wait_s
        self._say = say
        self._opened = opened
        self._most_loaded = most_loaded
        self._entries: dict[Hashable, _Entry] = {}
        self._mutex = threading.Lock()
        self._closed = False

    def session(
        self, choice: BoardChoice, *, runtimes: Sequence[str] = ("",), faults: Sequence[str] = ()
    ) -> BoardSession:
        """A board, opened if it is not open. One of a farm's stays the same board, however often it is opened.

        Args:
            runtimes: what is going to be used on it; "" is its config's own. They count where it is opened.
            faults: for a simulator: faults to switch on. With others it is another board.

        Raises:
            UsageError: it cannot be used that way.
            BoardError: it cannot be had.
        """
        entry = self._entry(choice, runtimes, faults)
        with entry.mutex:
            if entry.session is None:
                self._adopt(entry, self._open(entry))
            assert entry.session is not None
            return entry.session

    def reconnect(self, choice: BoardChoice, error: BoardError, *, faults: Sequence[str] = ()) -> BoardSession | None:
        """After a board was lost: have it again if it comes back soon, and tell in the error what became of it.

        Nothing is run again. Only a board that is reached over SSH is looked for: another's link says all there is to
        know, and whoever asks for its session next opens it anew.
        """
        entry = self._entry(choice, ("",), faults)
        with entry.mutex:
            session, entry.session = entry.session, None
            if session is None:
                return None
            session.forget()
            board = reconnect(session.board, error, lambda: self._open(entry))
            if board is not None:
                self._adopt(entry, board)
            return entry.session

    def is_open(self, choice: BoardChoice, *, faults: Sequence[str] = ()) -> bool:
        """Whether a board is open."""
        entry = self._entries.get(_place(choice, faults))
        return entry is not None and entry.session is not None

    @property
    def any_open(self) -> bool:
        """Whether any board is open."""
        return any(entry.session is not None for entry in list(self._entries.values()))

    def give_back(self, choice: BoardChoice, *, faults: Sequence[str] = ()) -> None:
        """Close a board, if it is open."""
        with self._mutex:
            entry = self._entries.pop(_place(choice, faults), None)
        if entry is not None:
            session, entry.session = entry.session, None
            if session is not None:
                session.close()

    def close(self) -> None:
        """Close all boards; none is opened any more. May be called by another thread than those that use them."""
        with self._mutex:
            self._closed = True
            entries, self._entries = list(self._entries.values()), {}
        with contextlib.ExitStack() as stack:
            for entry in entries:
                # What this thread opened is idle; another thread's may be in use: closing it ends that.
                if entry.session is not None:
                    stack.callback(entry.session.close)

    def _entry(self, choice: BoardChoice, runtimes: Sequence[str], faults: Sequence[str]) -> _Entry:
        with self._mutex:
            if self._closed:
                raise BoardLost("the boards were given back", board=choice.name)
            return self._entries.setdefault(
                _place(choice, faults), _Entry(choice, tuple(dict.fromkeys(runtimes)) or ("",), tuple(faults))
            )

    def _open(self, entry: _Entry) -> Board:
        first, *others = entry.runtimes
        board = self._connect(entry, first)
        for runtime in others:
            if board.shell is None:
                break
            # An agent is put on a board with the runtime that is named then, and keeps those that it had.
            board.close()
            board = self._connect(entry, runtime)
        try:
            self._opened(board)
        except BaseException:
            board.close()
            raise
        # Whichever of a farm's boards it came to: another connection is to be to the same one.
        entry.choice = pinned(entry.choice, board.name)
        return board

    def _connect(self, entry: _Entry, runtime: str) -> Board:
        how: dict[str, Any] = {"purpose": self._purpose, "wait_s": self._wait_s, "say": self._say}
        return open_board(replace(entry.choice, runtime=runtime, faults=entry.faults, **how))

    def _adopt(self, entry: _Entry, board: Board) -> None:
        with self._mutex:
            if not self._closed:
                entry.session = BoardSession(board, self._most_loaded)
                return
        board.close()
        raise BoardLost("the boards were given back", board=board.name)

    def __enter__(self) -> BoardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _place(choice: BoardChoice, faults: Sequence[str]) -> Hashable:
    return choice.name, choice.config.path, tuple(faults)

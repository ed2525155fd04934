"""What the programs of a suite run are compiled for: all its boards take the same ones."""

from __future__ import annotations

import threading

from hil.core.boards import BoardConfig
from hil.errors import BoardError


class OtherTarget(BoardError):
    """A board that needs other programs than those of the suite."""


class Agreement:
    """What boards agree on: the first one's target.

    Args:
        compiler: whose flags say what that is.

    Attributes:
        config: of the first board; None while there is none.
        settled: set when it is there, or will never be.
    """

    def __init__(self, compiler: str) -> None:
        self._compiler = compiler
        self._lock = threading.Lock()
        self.config: BoardConfig | None = None
        self.settled = threading.Event()

    def join(self, config: BoardConfig) -> None:
        """A board comes in.

        Raises:
            OtherTarget: it needs other programs.
        """
        with self._lock:
            agreed = self.config = self.config or config
            self.settled.set()
        mine, theirs = (" ".join(one.compile_flags.get(self._compiler, ())) for one in (config, agreed))
        if mine != theirs:
            raise OtherTarget(
                f"it needs programs compiled with {mine or 'no flags'}, the others with {theirs or 'no flags'}",
                board=config.name,
                hint="boards of one suite run must be alike: run the suite on each kind of board by itself "
                "(a narrower selector has a farm lend boards of one kind)",
            )

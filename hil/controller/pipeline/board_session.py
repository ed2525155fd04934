"""A board that is used for runs, and the programs that stay loaded on it."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from hil.controller.devices.board import Board, LoadedProgram
from hil.core.results import Artifact
from hil.errors import BoardError, HilError


class BoardSession:
    """A board and the programs that are loaded on it.

    Args:
        most_loaded: how many programs stay loaded between runs; 0 unloads each after its run.
    """

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
        """Load a pushed program, or take the one that stayed loaded; whether it was loaded now.

        Args:
            timeout: seconds for loading it.
            no_fallback: whether a node that runs on another device than it was told to fails a run.
            check: looks at what was loaded; what it raises counts as an error of loading.

        Raises:
            LoadFailed, StageTimeout, BoardError: as it ends.
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
        """Unload a program that has run, unless it may stay loaded.

        Args:
            broken: whether it crashed or hung: what is left of it runs nothing more.
        """
        if broken:
            self._failed = None
        if broken or not self._most_loaded:
            program = self._loaded.pop(_key(artifact), None)
            if program is not None:
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

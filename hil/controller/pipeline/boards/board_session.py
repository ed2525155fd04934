"""Keep track of the programs that are loaded on a board."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from hil.controller.devices.board import Board
from hil.controller.devices.console.board_console import BoardConsole
from hil.controller.devices.loaded_program import LoadedProgram
from hil.core.results import Artifact
from hil.errors import BoardError, HilError


class BoardSession:
    """A board with its loaded programs.

    Args:
        most_loaded: Maximum number of programs that stay loaded between runs. 0 unloads each program after its run.
        console: The board's console; None if the board has no console, or hil cannot read it.
    """

    def __init__(self, board: Board, most_loaded: int = 0, console: BoardConsole | None = None) -> None:
        self.board = board
        self.console = console
        self._most_loaded = most_loaded
        self._loaded: dict[Hashable, LoadedProgram] = {}
        # The last program that failed to load, with the error. A second load would fail too.
        self._failed: tuple[Hashable, HilError] | None = None

    def load(
        self,
        artifact: Artifact,
        *,
        timeout: float,
        no_fallback: bool = False,
        instructions: bool = False,
        check: Callable[[LoadedProgram], None] = lambda program: None,
    ) -> tuple[LoadedProgram, bool]:
        """Load a pushed program (see :meth:`Board.load`), or return the program if it is already loaded.

        Args:
            instructions: Count the instructions of all iterations.
            check: Validates the loaded program. Its exceptions count as load errors.

        Returns:
            The program, and True if this call loaded it.
        """
        key = _make_program_key(artifact)
        if self._failed is not None and self._failed[0] == key:
            raise self._failed[1]
        if instructions and key in self._loaded and not self._loaded[key].wants_instructions:
            self._loaded.pop(key).unload()
        if key in self._loaded:
            return self._loaded[key], False
        while self._loaded and len(self._loaded) >= max(self._most_loaded, 1):
            self._loaded.pop(next(iter(self._loaded))).unload()
        try:
            program = self.board.load(artifact, timeout=timeout, no_fallback=no_fallback, instructions=instructions)
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
        """Return True if a program is loaded."""
        return _make_program_key(artifact) in self._loaded

    def unload_after_run(self, artifact: Artifact, *, broken: bool) -> None:
        """Unload a program after a run, unless the program may stay loaded.

        Args:
            broken: True if the program crashed or hung.
        """
        if broken:
            self._failed = None
        elif self._most_loaded:
            return
        self.unload(artifact)

    def unload(self, artifact: Artifact) -> None:
        """Unload a program if it is loaded."""
        if (program := self._loaded.pop(_make_program_key(artifact), None)) is not None:
            program.unload()

    def explain(self, error: HilError) -> None:
        """Add console lines to the error of a lost board or a crashed program: see :meth:`BoardConsole.explain`."""
        if self.console is not None:
            self.console.set_clock(self.board.get_clock_fit())
            self.console.explain(error)

    def close(self) -> None:
        """Unload all programs and close the board."""
        loaded, self._loaded = list(self._loaded.values()), {}
        try:
            for program in loaded:
                program.unload()
        finally:
            self.board.close()

    def forget(self) -> None:
        """Discard the list of loaded programs after the board was lost."""
        self._loaded.clear()


def _make_program_key(artifact: Artifact) -> Hashable:
    # Use the digests of all files, because weights may be in a separate file.
    return (*sorted(artifact.digests.items()), artifact.function)

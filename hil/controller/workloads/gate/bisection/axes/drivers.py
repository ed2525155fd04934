"""Axis of driver or firmware versions that a command installs on the board."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from hil.controller.pipeline.case import Case
from hil.controller.records.decisions.gate import GateCandidate, GateVerdict
from hil.controller.storage.run_context import Progress
from hil.controller.storage.runs import make_safe_name
from hil.controller.workloads.gate.bisection.axes.axis import BisectAxis, CandidateRange, make_version_range
from hil.controller.workloads.gate.bisection.shell import run_command
from hil.controller.workloads.gate.bisection.suspect import SuspectRun, is_failing
from hil.controller.workloads.gate.plan import GateCase
from hil.core.board_config import BoardConfig
from hil.errors import HilError, UsageError

# Environment of the command: the version to install, and the board's name.
DRIVER_VARIABLE = "HIL_DRIVER"
BOARD_VARIABLE = "HIL_BOARD"


class DriverAxis(BisectAxis):
    """Versions of a driver or firmware, on the boards of all suspects.

    At the end, also after Ctrl-C, each changed board gets the last version.

    Args:
        command: command for the shell that installs a version on a board.
        versions: oldest first.
        timeout_s: maximum duration of the command in seconds.
        folder: directory for the log of the last installation.
    """

    name = "driver"
    # A verdict says `board fault` if the old program also fails with the new driver.
    verdicts = ("broken", "regressed", "toolchain", "board fault")
    changes_board = True

    def __init__(self, command: str, timeout_s: float, versions: Sequence[str], folder: Path, screen: Progress) -> None:
        self._command = command
        self._timeout_s = timeout_s
        self._versions = versions
        self._folder = folder
        self._screen = screen
        # Board -> version, "" while a version is being installed.
        self._installed: dict[str, str] = {}
        self._suspects: dict[str, SuspectRun] = {}

    @contextlib.contextmanager
    def open_search(self) -> Iterator[None]:
        """Install the last version on all changed boards at the end."""
        try:
            yield
        finally:
            self._restore_boards()

    def is_searchable(self, verdict: GateVerdict) -> bool:
        """Return whether a driver can be the cause of a verdict. A board fault must have a failure of the program."""
        return super().is_searchable(verdict) and (verdict.verdict != "board fault" or is_failing(verdict))

    def find_candidates(self, case: GateCase, verdict: GateVerdict) -> CandidateRange:
        """Return the versions."""
        if not is_failing(verdict):
            raise UsageError("hil searches drivers only for wrong programs: times with different drivers vary too much")
        return make_version_range("driver", self._versions)

    def prepare(self, candidate: GateCandidate, suspects: Sequence[SuspectRun], folder: Path) -> str:
        """Install a version on the boards of the suspects."""
        for board, suspect in {one.board: one for one in suspects}.items():
            if self._installed.get(board) == candidate.value:
                continue
            if problem := self._install(suspect, candidate.value, folder / f"install-{make_safe_name(board)}.log"):
                return problem
        return ""

    def make_program(self, suspect: SuspectRun, candidate: GateCandidate, folder: Path, config: BoardConfig) -> Case:
        """Return the judged program."""
        return suspect.restore_judged()

    def _install(self, suspect: SuspectRun, version: str, log: Path) -> str:
        board = suspect.board
        self._installed[board], self._suspects[board] = "", suspect
        suspect.release_board()
        variables = {DRIVER_VARIABLE: version, BOARD_VARIABLE: board}
        problem = run_command(self._command, Path(), variables, title="the command", timeout_s=self._timeout_s, log=log)
        if not problem:
            self._installed[board] = version
        return problem

    def _restore_boards(self) -> None:
        newest = self._versions[-1]
        for board, version in self._installed.items():
            if version == newest:
                continue
            self._screen.note(f"installing driver {newest} on {board} again")
            log = self._folder / f"driver-{make_safe_name(board)}.log"
            try:
                problem = self._install(self._suspects[board], newest, log)
            except HilError as error:  # such as a full disk; the other boards also need their driver
                problem = error.message
            if problem:
                self._screen.note(f"board {board} does not have driver {newest}: {problem}")

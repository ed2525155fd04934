"""Interface of an axis: a list of candidates, from a good one to a bad one, and how to test each."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hil.controller.pipeline.case import Case
from hil.controller.records.decisions.gate import AxisName, GateCandidate, GateVerdict, GateVerdictName
from hil.controller.workloads.gate.bisection.suspect import SuspectRun
from hil.controller.workloads.gate.plan import GateCase
from hil.core.board_config import BoardConfig


@dataclass(frozen=True)
class CandidateRange:
    """The candidates for a suspect.

    Attributes:
        candidates: at least two. The first should be good, and the last bad.
        first, last: names of both ends for messages.
        where: addition for messages about a test, such as " in a clean checkout".
        needs_good: whether the first candidate counts as good only after it passed a test.
    """

    candidates: Sequence[GateCandidate]
    first: str
    last: str
    where: str = ""
    needs_good: bool = True


class BisectAxis(ABC):
    """An axis of a search.

    Attributes:
        name: name in records and messages.
        verdicts: verdicts whose cause can be on this axis.
        changes_board: whether a candidate changes the board, so that the good program may fail, and times of different
            candidates cannot be measured in turns.
    """

    name: ClassVar[AxisName]
    verdicts: ClassVar[Sequence[GateVerdictName]] = ("broken", "regressed", "toolchain")
    changes_board: ClassVar[bool] = False

    def open_search(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which candidates can be tested. Its end removes temporary files, or restores boards."""
        return contextlib.nullcontext()

    def is_searchable(self, verdict: GateVerdict) -> bool:
        """Return whether the axis can contain the cause of a verdict."""
        return verdict.verdict in self.verdicts

    @abstractmethod
    def find_candidates(self, case: GateCase, verdict: GateVerdict) -> CandidateRange:
        """Return the candidates for a suspect. Raises UsageError if there are none."""

    def prepare(self, candidate: GateCandidate, suspects: Sequence[SuspectRun], folder: Path) -> str:
        """Make a candidate the current one. Return the reason if this fails, or "".

        Args:
            suspects: suspects to test with the candidate.
            folder: directory for logs.
        """
        return ""

    @abstractmethod
    def make_program(self, suspect: SuspectRun, candidate: GateCandidate, folder: Path, config: BoardConfig) -> Case:
        """Return the suspect's case with the program of the current candidate.

        Args:
            config: the board's config.

        Raises:
            UsageError: files are missing, or do not match the model.
        """


def make_version_range(noun: str, versions: Sequence[str]) -> CandidateRange:
    """Return versions of a compiler or driver as candidates."""
    return CandidateRange(
        [GateCandidate(value=version) for version in versions],
        first=f"the program with {noun} {versions[0]}",
        last=f"the program with {noun} {versions[-1]}",
    )

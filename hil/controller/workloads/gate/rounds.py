"""File of a gate with the rounds of its measurements, which is written after each round."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hil.controller.storage.runs import storing
from hil.core.files import read_text

ROUNDS = "rounds.csv"
# The noise of a board is known from this many earlier gates.
_GATES_MOST = 20
_LONGEST_LINE = 4096


@dataclass(frozen=True)
class RoundsKey:
    """A measurement of two programs.

    Attributes:
        old: digest of the old program.
        new: judged run, or the commit that --bisect tests.
    """

    series: str
    old: str
    new: str
    board: str


@dataclass(frozen=True)
class RoundsFile:
    """The rounds of a gate in a directory, and of earlier gates next to it."""

    folder: Path

    def append(self, key: RoundsKey, log_ratio: float) -> None:
        """Add a round: the logarithm of the new program's time divided by the old program's."""
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow((key.series, key.old, key.new, key.board, repr(log_ratio)))
        with storing(self.folder), (self.folder / ROUNDS).open("ab+") as file:
            _remove_incomplete_line(file)
            file.write(line.getvalue().encode())

    def read(self) -> dict[RoundsKey, list[float]]:
        """Return the log ratios of each measurement. Incomplete lines are ignored."""
        return _read(self.folder / ROUNDS)

    def find_earlier(self, board: str) -> Iterator[list[float]]:
        """Yield the log ratios of measurements on a board in earlier gates, newest gates first."""
        paths = sorted(self.folder.parent.glob(f"*/{ROUNDS}"), reverse=True)
        for path in [path for path in paths if path.parent != self.folder][:_GATES_MOST]:
            yield from (found for key, found in _read(path).items() if key.board == board)


def _remove_incomplete_line(file: BinaryIO) -> None:
    """Remove the end of a file that a full disk or a killed process left without a line feed."""
    size = file.seek(0, io.SEEK_END)
    start = max(size - _LONGEST_LINE, 0)
    file.seek(start)
    end = file.read()
    if end and not end.endswith(b"\n"):
        file.truncate(start + end.rfind(b"\n") + 1)


def _read(path: Path) -> dict[RoundsKey, list[float]]:
    found: dict[RoundsKey, list[float]] = {}
    if not path.is_file():
        return found
    text = read_text(path)
    # A number that is cut off would be another number.
    for row in csv.reader(text[: text.rfind("\n") + 1].splitlines()):
        try:
            series, old, new, board, log_ratio = row
            value = float(log_ratio)
        except ValueError:
            continue  # incomplete: the disk was full, or the process was killed
        if math.isfinite(value):
            found.setdefault(RoundsKey(series, old, new, board), []).append(value)
    return found

"""File with the measured rounds of a gate, written after every round."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hil.controller.storage.line_file import read_lines, remove_incomplete_line
from hil.controller.storage.runs import convert_write_errors

ROUNDS = "rounds.csv"
# Number of earlier gates from which a board's noise is estimated.
_MAX_GATES = 20


@dataclass(frozen=True)
class RoundsKey:
    """A measurement of two programs.

    Attributes:
        old: digest of the old program.
        new: judged run, or commit that --bisect tests.
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
        """Add a round: the logarithm of the new program's time divided by the old program's.

        nan discards the earlier rounds of the measurement.
        """
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow((key.series, key.old, key.new, key.board, repr(log_ratio)))
        path = self.folder / ROUNDS
        with convert_write_errors(self.folder):
            # Remove an incomplete line first, because the start of a cut number would be read as a different number.
            remove_incomplete_line(path)
            with path.open("a") as file:
                file.write(line.getvalue())

    def read(self) -> dict[RoundsKey, list[float]]:
        """Return the log ratios of every measurement. Incomplete lines are ignored."""
        return _read(self.folder / ROUNDS)

    def find_earlier(self, board: str) -> Iterator[list[float]]:
        """Yield the log ratios of measurements on a board in earlier gates, newest gates first."""
        paths = sorted(self.folder.parent.glob(f"*/{ROUNDS}"), reverse=True)
        for path in [path for path in paths if path.parent != self.folder][:_MAX_GATES]:
            yield from (found for key, found in _read(path).items() if key.board == board)


def _read(path: Path) -> dict[RoundsKey, list[float]]:
    found: dict[RoundsKey, list[float]] = {}
    for line in read_lines(path):
        try:
            # Parse each line alone, so that a damaged line does not affect the next lines.
            (row,) = csv.reader([line.decode(errors="replace")])
            series, old, new, board, log_ratio = row
            value = float(log_ratio)
        except (ValueError, csv.Error):
            continue  # damaged
        if math.isnan(value):
            found.pop(RoundsKey(series, old, new, board), None)
        elif math.isfinite(value):
            found.setdefault(RoundsKey(series, old, new, board), []).append(value)
    return found

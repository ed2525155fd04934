"""File of a gate with the rounds of its measurements, which is written after each round."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hil.controller.storage.runs import storing
from hil.core.files import read_text
from hil.errors import UsageError

ROUNDS = "rounds.csv"
# The noise of a board is known from this many earlier gates.
_GATES_MOST = 20


@dataclass(frozen=True)
class RoundsKey:
    """A measurement: its series, the judged run, and the board."""

    series: str
    run: str
    board: str


@dataclass(frozen=True)
class RoundsFile:
    """The rounds of a gate in a directory, and of earlier gates next to it."""

    folder: Path

    def append(self, key: RoundsKey, log_ratio: float) -> None:
        """Add a round: the logarithm of the new program's time divided by the old program's."""
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow((key.series, key.run, key.board, repr(log_ratio)))
        with storing(self.folder), (self.folder / ROUNDS).open("a") as file:
            file.write(line.getvalue())

    def read(self) -> dict[RoundsKey, list[float]]:
        """Return the log ratios of each measurement. An incomplete last line of a killed gate is ignored.

        Raises:
            UsageError: the file is damaged.
        """
        return _read(self.folder / ROUNDS)

    def find_earlier(self, board: str) -> Iterator[list[float]]:
        """Yield the log ratios of measurements on a board in earlier gates, newest gates first."""
        paths = sorted(self.folder.parent.glob(f"*/{ROUNDS}"), reverse=True)
        for path in [path for path in paths if path.parent != self.folder][:_GATES_MOST]:
            try:
                measured = _read(path)
            except UsageError:
                continue  # earlier noise is only a help
            yield from (found for key, found in measured.items() if key.board == board)


def _read(path: Path) -> dict[RoundsKey, list[float]]:
    found: dict[RoundsKey, list[float]] = {}
    if not path.is_file():
        return found
    text = read_text(path)
    for row in csv.reader(text[: text.rfind("\n") + 1].splitlines()):
        try:
            *names, log_ratio = row
            value = float(log_ratio)
            key = RoundsKey(*names)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path} is damaged: {','.join(row)[:80]!r}") from error
        if not math.isfinite(value):
            raise UsageError(f"{path} is damaged: {','.join(row)[:80]!r}")
        found.setdefault(key, []).append(value)
    return found

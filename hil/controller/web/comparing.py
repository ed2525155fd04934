"""Compare two sides case by case: what broke or was fixed, and which numbers changed by how much.

Everything is decided for all cases at once, as columns (:mod:`hil.controller.web.moves`,
:mod:`hil.controller.web.movers`); :class:`Pair` and :class:`Mover` are made of those that are shown.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hil.controller.analysis.bench.stats import Comparison
from hil.controller.web.case_columns import Words
from hil.controller.web.movers import NOTHING, NUMBERS, SAME, WORDS, Movers, movers_of
from hil.controller.web.moves import LACKING, MOVES, Pairs, pairs_of
from hil.controller.web.sessions import Session
from hil.controller.web.side_cases import Places, SideCases, side_cases
from hil.controller.web.sides import Side
from hil.controller.workloads.suites.reports.results import is_failing

__all__ = ["MOVES", "NOTHING", "NUMBERS", "SAME", "Compared", "Ends", "Mover", "Pair", "compare_sides"]


@dataclass(frozen=True)
class Ends:
    """How a case ended on one side."""

    outcomes: Mapping[str, int]  # outcome regardless of expectations -> in how many sessions; the latest first
    session: Session | None = None  # the latest that has it; None where no session does
    message: str = ""  # of several sessions that of one that fails
    samples: int = 0  # in how many sessions it is

    @property
    def word(self) -> str:
        """The outcome that decides: the latest of those that fail, if any does, and else the latest."""
        return next((word for word in self.outcomes if is_failing(word)), next(iter(self.outcomes)))


@dataclass(frozen=True)
class Pair:
    """A case of both sides, or of one."""

    name: str
    before: Ends
    after: Ends
    move: str  # of MOVES; "" is a case that has nothing to tell

    @property
    def message(self) -> str:
        """Why: of the later side, or else of the earlier one."""
        return self.after.message or self.before.message


@dataclass(frozen=True)
class Mover:
    """A number of a case on both sides."""

    pair: Pair
    what: str  # of NUMBERS
    # before, after: of several samples the median.
    before: float
    after: float
    # how many samples that are; of device times those of enough iterations
    count_before: int
    count_after: int
    ratio: float | None  # after by before; of several samples of times by their geometric means; None: see Change
    comparison: Comparison | None  # where there are samples enough for an interval
    verdict: str
    why: str = ""  # what the verdict rests on
    cases: int = 1  # how many cases share the program whose size this is
    output: str = ""  # of a case with several outputs the one whose number this is

    @property
    def decided(self) -> bool:
        """Whether it changed."""
        return self.verdict not in (SAME, NOTHING)

    @property
    def worse(self) -> bool:
        """Whether it changed for the worse."""
        return self.verdict == WORDS[self.what][1]


@dataclass(frozen=True, eq=False)
class Compared:
    """Two sides, case by case."""

    a: SideCases
    b: SideCases
    words: Words
    columns: Pairs
    numbers: Mapping[str, Movers]  # of NUMBERS -> every case that has it on both sides

    @property
    def total(self) -> int:
        """How many cases there are."""
        return self.columns.names.size

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """Kind of move -> number of cases; and of each number, how many changed."""
        return {**self.columns.counts(), **{what: int(one.decided.sum()) for what, one in self.numbers.items()}}

    @property
    def device_cases(self) -> int:
        """How many cases' device times were measured well enough on both sides to be compared."""
        return int((self.numbers["device_p50_ns"].count_before > 0).sum())

    @property
    def device_few(self) -> int:
        """Of how many cases they are not compared, since a side timed too few iterations."""
        return self.numbers["device_p50_ns"].pair.size - self.device_cases

    @property
    def device_ratio(self) -> float | None:
        """Geometric mean of the ratios of device times, over :attr:`device_cases`; None without any."""
        times = self.numbers["device_p50_ns"]
        ratios = times.ratio[(times.count_before > 0) & (times.ratio > 0)]
        return float(np.exp(np.log(ratios).mean())) if ratios.size else None

    @property
    def pairs(self) -> list[Pair]:
        """Every case."""
        return self.pairs_at(np.arange(self.total))

    @property
    def movers(self) -> list[Mover]:
        """Every number of every case of both sides."""
        return [mover for what, one in self.numbers.items() for mover in self.movers_at(what, np.arange(one.pair.size))]

    def names(self, pairs: Places) -> list[str]:
        """The names of cases."""
        return self.words.of(self.columns.names[pairs])

    def pairs_at(self, places: Places) -> list[Pair]:
        """Some of the cases."""
        columns = self.columns
        for side, cases in ((self.a, columns.before[places]), (self.b, columns.after[places])):
            self.words.of(side.messages(cases[cases >= 0]))  # all at once
        found = []
        for place, name in zip(places, self.names(places), strict=True):
            before = self._ends(self.a, columns.before[place], columns.was[place])
            after = self._ends(self.b, columns.after[place], columns.became[place])
            found.append(Pair(name, before, after, columns.move(place)))
        return found

    def movers_at(self, what: str, places: Places) -> list[Mover]:
        """Some of the cases that have a number on both sides."""
        one = self.numbers[what]
        found = []
        for place, pair in zip(places, self.pairs_at(one.pair[places]), strict=True):
            before, after = (_plain(float(values[place]), what) for values in (one.before, one.after))
            ratio = float(one.ratio[place])
            mover = Mover(
                pair,
                what,
                before,
                after,
                int(one.count_before[place]),
                int(one.count_after[place]),
                None if np.isnan(ratio) else ratio,
                one.comparisons.of(place) if one.comparisons else None,
                one.verdict(place),
                one.why(place),
                int(one.cases[place]),
                *(self.words.of([one.output[place]]) if one.output is not None else ()),
            )
            found.append(mover)
        return found

    def _ends(self, side: SideCases, case: int, word: int) -> Ends:
        if case < 0:
            return Ends({self.words.of([word])[0]: 1})
        samples = side.samples_of(case)
        outcomes = Counter(self.words.of(side.ended[samples]))
        (message,) = self.words.of(side.messages(np.array([case])))
        return Ends(outcomes, side.sessions[side.session[samples[0]]], message, samples.size)


def _plain(value: float, what: str) -> float:
    """A number as it is stored: sizes are whole ones."""
    return int(value) if what == "artifact_bytes" and value.is_integer() else value


def compare_sides(database: sqlite3.Connection, a: Side, b: Side) -> Compared:
    """Compare a baseline ``a`` with ``b``. Raises UsageError: a side has too many results."""
    words = Words(database, LACKING)
    old, new = (side_cases(database, side, words) for side in (a, b))
    pairs = pairs_of(old, new, words)
    return Compared(old, new, words, pairs, {one.what: one for one in movers_of(old, new, pairs)})

"""Compare two sides case by case: new failures, fixes, and changed numbers.

This module compares all cases together, as columns (:mod:`hil.controller.web.compare.moves`,
:mod:`hil.controller.web.compare.movers`). It creates :class:`CasePair` and :class:`Mover` objects only for displayed
cases.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hil.controller.records.measurements.bench import SpeedComparison
from hil.controller.storage.outcomes import is_failing
from hil.controller.web.compare.case_columns import WordLookup
from hil.controller.web.compare.movers import NOTHING, NUMBERS, SAME, WORDS, Movers, find_movers
from hil.controller.web.compare.moves import LACKING, MOVES, Pairs, pair_cases
from hil.controller.web.compare.side_cases import Places, SideCases, read_side_cases
from hil.controller.web.index.sessions import IndexedSession
from hil.controller.web.session.sides import ComparedSide

__all__ = [
    "MOVES",
    "NOTHING",
    "NUMBERS",
    "SAME",
    "CaseOutcomes",
    "CasePair",
    "ComparisonResult",
    "Mover",
    "compare_sides",
]


@dataclass(frozen=True)
class CaseOutcomes:
    """A case's outcomes on one side."""

    outcomes: Mapping[str, int]  # outcome (without expectations) -> number of sessions; latest first
    session: IndexedSession | None = None  # the latest session with this case, if any
    message: str = ""  # preferably from a failing session
    samples: int = 0  # number of sessions with this case

    @property
    def word(self) -> str:
        """The decisive outcome: the latest failing outcome, or the latest outcome if none fails."""
        return next((word for word in self.outcomes if is_failing(word)), next(iter(self.outcomes)))


@dataclass(frozen=True)
class CasePair:
    """Case that exists on one or both sides."""

    name: str
    before: CaseOutcomes
    after: CaseOutcomes
    move: str  # from MOVES; "" if unchanged

    @property
    def message(self) -> str:
        """The message of the later side, or of the earlier side if the later is empty."""
        return self.after.message or self.before.message


@dataclass(frozen=True)
class Mover:
    """A case's number on both sides."""

    pair: CasePair
    what: str  # from NUMBERS
    # before, after: the median if there are multiple samples.
    before: float
    after: float
    # sample counts; for device times, only samples with enough iterations
    count_before: int
    count_after: int
    ratio: float | None  # after / before; for multiple device times, from geometric means
    comparison: SpeedComparison | None  # set if there are enough samples for an interval
    verdict: str
    why: str = ""  # reason for the verdict
    cases: int = 1  # for program sizes: number of cases that share the program
    output: str = ""  # output name, if the case has multiple outputs

    @property
    def decided(self) -> bool:
        """Whether the number changed."""
        return self.verdict not in (SAME, NOTHING)

    @property
    def worse(self) -> bool:
        """Whether the number got worse."""
        return self.verdict == WORDS[self.what][1]


@dataclass(frozen=True, eq=False)
class ComparisonResult:
    """Result of comparing two sides case by case."""

    a: SideCases
    b: SideCases
    words: WordLookup
    columns: Pairs
    numbers: Mapping[str, Movers]  # NUMBERS key -> all cases with that number on both sides

    @property
    def total(self) -> int:
        """Case count."""
        return self.columns.names.size

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """Case counts by move, and counts of changed cases by NUMBERS key."""
        return {**self.columns.count_kinds(), **{what: int(one.decided.sum()) for what, one in self.numbers.items()}}

    @property
    def device_cases(self) -> int:
        """Number of cases with enough device samples on both sides for a comparison."""
        return int((self.numbers["device_p50_ns"].count_before > 0).sum())

    @property
    def device_few(self) -> int:
        """Number of cases whose device times are not compared, because a side has too few iterations or grade F."""
        return self.numbers["device_p50_ns"].pair.size - self.device_cases

    @property
    def device_ratio(self) -> float | None:
        """Geometric mean of the device time ratios over :attr:`device_cases`, or None without such cases."""
        times = self.numbers["device_p50_ns"]
        ratios = times.ratio[(times.count_before > 0) & (times.ratio > 0)]
        return float(np.exp(np.log(ratios).mean())) if ratios.size else None

    @property
    def pairs(self) -> list[CasePair]:
        """All cases."""
        return self.list_pairs(np.arange(self.total))

    @property
    def movers(self) -> list[Mover]:
        """All numbers for all cases that exist on both sides."""
        return [
            mover for what, one in self.numbers.items() for mover in self.list_movers(what, np.arange(one.pair.size))
        ]

    def list_names(self, pairs: Places) -> list[str]:
        """Return the names of cases."""
        return self.words.get_texts(self.columns.names[pairs])

    def list_pairs(self, places: Places) -> list[CasePair]:
        """Return the cases at the given places."""
        columns = self.columns
        for side, cases in ((self.a, columns.before[places]), (self.b, columns.after[places])):
            self.words.get_texts(side.list_messages(cases[cases >= 0]))  # read all messages in a single query
        found = []
        for place, name in zip(places, self.list_names(places), strict=True):
            before = self._read_outcomes(self.a, columns.before[place], columns.was[place])
            after = self._read_outcomes(self.b, columns.after[place], columns.became[place])
            found.append(CasePair(name, before, after, columns.move(place)))
        return found

    def list_movers(self, what: str, places: Places) -> list[Mover]:
        """Return the movers of the number ``what`` at the given places."""
        one = self.numbers[what]
        found = []
        for place, pair in zip(places, self.list_pairs(one.pair[places]), strict=True):
            before, after = (_restore_int(float(values[place]), what) for values in (one.before, one.after))
            ratio = float(one.ratio[place])
            mover = Mover(
                pair,
                what,
                before,
                after,
                int(one.count_before[place]),
                int(one.count_after[place]),
                None if np.isnan(ratio) else ratio,
                one.comparisons.compare_pair(place) if one.comparisons else None,
                one.verdict(place),
                one.explain(place),
                int(one.cases[place]),
                *(self.words.get_texts([one.output[place]]) if one.output is not None else ()),
            )
            found.append(mover)
        return found

    def _read_outcomes(self, side: SideCases, case: int, word: int) -> CaseOutcomes:
        if case < 0:
            return CaseOutcomes({self.words.get_texts([word])[0]: 1})
        samples = side.list_samples(case)
        outcomes = Counter(self.words.get_texts(side.ended[samples]))
        (message,) = self.words.get_texts(side.list_messages(np.array([case])))
        return CaseOutcomes(outcomes, side.sessions[side.session[samples[0]]], message, samples.size)


def _restore_int(value: float, what: str) -> float:
    """Convert whole program sizes back to int."""
    return int(value) if what == "artifact_bytes" and value.is_integer() else value


def compare_sides(database: sqlite3.Connection, a: ComparedSide, b: ComparedSide) -> ComparisonResult:
    """Compare the baseline ``a`` with ``b``. Raises UsageError if a side exceeds the result limit."""
    words = WordLookup(database, LACKING)
    old, new = (read_side_cases(database, side, words) for side in (a, b))
    pairs = pair_cases(old, new, words)
    return ComparisonResult(old, new, words, pairs, {one.what: one for one in find_movers(old, new, pairs)})

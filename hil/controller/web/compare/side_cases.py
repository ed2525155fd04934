"""Cases of a comparison's side, with samples from all its sessions, as columns."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hil.controller.storage.outcomes import is_failing
from hil.controller.web.compare.case_columns import (
    MAX_OUTPUTS,
    NO_OUTPUTS,
    Columns,
    Keys,
    WordLookup,
    read_columns,
    read_outputs,
)
from hil.controller.web.index.sessions import IndexedSession
from hil.controller.web.readers.fields import read_document, read_list
from hil.controller.web.session.sides import CASE_FILTERS, ComparedSide
from hil.controller.web.text.entries import read_text
from hil.controller.workloads.suites.reports.changes import ITERATIONS
from hil.controller.workloads.suites.store import HEAD
from hil.errors import UsageError

Places = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float64]
# Maximum samples per side. Comparing them takes 100 MB and a second.
MAX_SAMPLES = 500_000
_FEWER = "compare fewer sessions, or filter by board, model or flow"


@dataclass(frozen=True, eq=False)
class SideCases:
    """Cases and samples of a side. Cases are indices into ``names``, and samples are indices into ``samples``.

    A sample is a case in one session.
    """

    sessions: Sequence[IndexedSession]
    names: Keys  # in the order of the latest session
    samples: Columns  # latest first
    session: Places  # per sample: index of the session
    case: Places  # per sample: index of the case
    ended: Keys  # per sample: outcome without expectations
    latest: Places  # per case: latest sample
    deciding: Places  # per case: latest failing sample, or latest sample if none fails
    not_run: Keys  # names of planned cases in incomplete suite runs
    outputs: Columns  # outputs of samples with multiple outputs, unordered
    of_sample: Places  # per output: index of the sample

    @property
    def size(self) -> int:
        """Number of cases."""
        return self.names.size

    def list_samples(self, case: int) -> Places:
        """Return the samples of a case, latest first."""
        order, start = self._by_case
        return order[start[case] : start[case + 1]]

    def list_messages(self, cases: Places) -> Keys:
        """Return the messages of cases, from the decisive samples."""
        found: Keys = self.samples["message"][self.deciding[cases]]
        return found

    @cached_property
    def several(self) -> npt.NDArray[np.bool_]:
        """Mask of cases that have multiple outputs in any sample."""
        found = np.zeros(self.size, np.bool_)
        found[self.case[self.of_sample]] = True
        return found

    @cached_property
    def _by_case(self) -> tuple[Places, Places]:
        """Samples sorted by case, and the start of every case."""
        return np.argsort(self.case, kind="stable"), np.append(
            0, np.cumsum(np.bincount(self.case, minlength=self.size))
        )


def read_side_cases(database: sqlite3.Connection, side: ComparedSide, words: WordLookup) -> SideCases:
    """Read the cases of a side. Raises UsageError if there are too many."""
    only = {name: value for name, value in side.only.items() if name in CASE_FILTERS}
    parts = list[Columns]()
    for session in side.sessions:
        parts.append(read_columns(database, session, only))
        if sum(part.size for part in parts) > MAX_SAMPLES:
            raise UsageError(f"one side has more than {MAX_SAMPLES} case results", hint=_FEWER)
    samples = parts[0] if len(parts) == 1 else np.concatenate(parts)
    names, latest, case = _find_unique(samples["name"], one=len(parts) == 1)
    as_expected = np.isin(samples["ended"], words.keys([""]))
    ended = np.where(as_expected, samples["outcome"], samples["ended"]).astype(np.int64)
    fails = np.isin(ended, find_failing_words(np.unique(ended), words))
    deciding = latest.copy()
    # Reverse the order: with repeated indices, numpy keeps the last write, which must be the latest sample.
    failing = np.flatnonzero(fails)[::-1]
    deciding[case[failing]] = failing
    whose = np.repeat(np.arange(len(parts)), [part.size for part in parts])
    outputs, of_sample = _read_outputs(database, side.sessions, parts)
    not_run = words.keys(_list_missing_case_ids(side))
    return SideCases(side.sessions, names, samples, whose, case, ended, latest, deciding, not_run, outputs, of_sample)


def _read_outputs(
    database: sqlite3.Connection, sessions: Sequence[IndexedSession], parts: Sequence[Columns]
) -> tuple[Columns, Places]:
    """Return the outputs of samples with multiple outputs, and the sample of every output."""
    found, samples, first = [NO_OUTPUTS], [np.empty(0, np.intp)], 0
    for session, part in zip(sessions, parts, strict=True):
        outputs = read_outputs(database, session)
        if outputs.size and part.size:
            order = np.argsort(part["name"])
            place = order[np.minimum(np.searchsorted(part["name"], outputs["name"], sorter=order), part.size - 1)]
            there = part["name"][place] == outputs["name"]
            found.append(outputs[there])
            samples.append(first + place[there])
            if sum(map(len, found)) > MAX_OUTPUTS:
                raise UsageError(f"one side has more than {MAX_OUTPUTS} case outputs", hint=_FEWER)
        first += part.size
    return np.concatenate(found), np.concatenate(samples)


def find_failing_words(keys: Keys, words: WordLookup) -> Keys:
    """Return the outcomes that are failures."""
    return keys[np.array([is_failing(word) for word in words.get_texts(keys)], np.bool_)]


def _find_unique(names: Keys, *, one: bool) -> tuple[Keys, Places, Places]:
    """Return the unique names in order of appearance, their first indices, and for every index the number of its name.

    Args:
        one: True if all names are unique.
    """
    if one:
        places = np.arange(names.size)
        return names.astype(np.int64), places, places
    found, first, which = np.unique(names, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(order.size)
    return found[order].astype(np.int64), first[order], number[which]


def _list_missing_case_ids(side: ComparedSide) -> frozenset[str]:
    """Return the planned case ids of a side's incomplete suite runs."""
    found: set[str] = set()
    for session in side.sessions:
        if session.kind == "suite" and session.planned > session.cases:
            with contextlib.suppress(OSError, ValueError):
                found.update(map(read_text, read_list(read_document(Path(session.folder) / HEAD).get("ids"))))
    return frozenset(found)


@dataclass(frozen=True, eq=False)
class NumberValues:
    """Values of a number per case: number of samples, median, minimum and maximum.

    Without samples, the values are NaN.
    """

    count: Places
    median: Floats
    low: Floats
    high: Floats

    def at(self, places: Places) -> NumberValues:
        """Return the values of the given cases."""
        return NumberValues(self.count[places], self.median[places], self.low[places], self.high[places])


def read_values(side: SideCases, column: Floats, mask: npt.NDArray[np.bool_]) -> NumberValues:
    """Return the values of a number for a side's cases, from the samples in a mask."""
    if side.case.size == side.size:
        only = np.where(mask, column, np.nan)
        return NumberValues(np.bincount(side.case[mask], minlength=side.size), only, only, only)
    return gather_values(side.case[mask], side.size, column[mask])


def gather_values(case: Places, size: int, values: Floats) -> NumberValues:
    """Aggregate values by case.

    Args:
        case: index of the case for every value.
        size: number of cases.
        values: samples of the number.
    """
    count = np.bincount(case, minlength=size)
    if case.size == size and count.all():  # a single value per case
        only = np.empty(size)
        only[case] = values
        return NumberValues(count, only, only, only)
    values = np.append(values[np.lexsort((values, case))], np.nan)
    start = np.cumsum(count) - count
    low, high = (
        np.where(count > 0, values[np.where(count > 0, place, 0)], np.nan) for place in (start, start + count - 1)
    )
    left, right = (values[np.where(count > 0, start + half, -1)] for half in ((count - 1) // 2, count // 2))
    with np.errstate(invalid="ignore", over="ignore"):
        return NumberValues(count, np.where(left == right, left, (left + right) / 2), low, high)


@dataclass(frozen=True, eq=False)
class DeviceTimes:
    """Device times of a side's cases. Samples with enough iterations are preferred."""

    used: npt.NDArray[np.bool_]  # mask of samples
    times: NumberValues
    p90_ns: Floats  # per case: maximum, or 0 without samples
    iterations: Places  # per case: minimum, or 0 without samples or with grade F


def read_device_times(side: SideCases) -> DeviceTimes:
    """Return the device times of a side's cases."""
    times, iterations = side.samples["device_p50_ns"], side.samples["comparable"]
    known = np.isfinite(times) & (times != 0)
    enough = known & (iterations >= ITERATIONS)
    used = enough | (known & ~np.bincount(side.case[enough], minlength=side.size).astype(np.bool_)[side.case])
    fewest = np.full(side.size, np.iinfo(np.int64).max)
    np.minimum.at(fewest, side.case[used], iterations[used])
    fewest[fewest == np.iinfo(np.int64).max] = 0
    p90 = np.nan_to_num(side.samples["device_p90_ns"], nan=0.0, posinf=np.inf)
    largest = np.zeros(side.size)
    np.maximum.at(largest, side.case[used], p90[used])
    return DeviceTimes(used, read_values(side, times, used), largest, fewest)

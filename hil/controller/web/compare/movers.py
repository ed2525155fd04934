"""Compare the values of cases that are on both sides of a comparison, and find the values that changed.

Single samples follow the rules of `hil suite diff` (:mod:`hil.controller.workloads.suites.reports.changes`). Multiple
samples follow :mod:`hil.controller.analysis.bench.stats`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hil.controller.analysis.bench.stats import Comparisons, compare_spreads, spread_of
from hil.controller.devices.measuring.time_statistics import DEFAULT_EFFECT
from hil.controller.web.compare.case_columns import Keys
from hil.controller.web.compare.moves import Pairs
from hil.controller.web.compare.output_pairs import pair_outputs
from hil.controller.web.compare.side_cases import (
    Floats,
    NumberValues,
    Places,
    SideCases,
    read_device_times,
    read_values,
)
from hil.controller.workloads.suites.reports.changes import (
    ITERATIONS,
    has_energy_changed,
    has_error_changed,
    has_size_changed,
    has_sqnr_changed,
    time_changed,
)

Mask = npt.NDArray[np.bool_]
NUMBERS = ("device_p50_ns", "artifact_bytes", "joules", "max_abs", "sqnr_db")
NOTHING, SAME = "not comparable", "no difference"
# Verdicts for an improvement and for a regression.
WORDS: Mapping[str, tuple[str, str]] = {
    "device_p50_ns": ("faster", "slower"),
    "artifact_bytes": ("smaller", "larger"),
    "joules": ("less energy", "more energy"),
    "max_abs": ("closer", "further off"),
    "sqnr_db": ("closer", "further off"),
}
# For cases with multiple outputs, show the largest regression among outputs, or the largest change without regressions.
OF_OUTPUTS = ("max_abs", "sqnr_db")
_COLUMNS = ("pair", "before", "after", "count_before", "count_after", "ratio", "state", "cases")
_UNTOLD, _SAME, _BETTER, _WORSE = range(4)


@dataclass(frozen=True, eq=False)
class Movers:
    """The values of a number, for cases with the number on both sides, as columns with equal lengths."""

    what: str  # from NUMBERS
    pair: Places
    # before, after: the median if there are multiple samples
    before: Floats
    after: Floats
    # sample counts; for device times, only samples with enough iterations
    count_before: Places
    count_after: Places
    ratio: Floats  # after / before; for multiple device times, from geometric means; NaN if undefined
    state: npt.NDArray[np.int8]
    cases: Places  # for sizes: number of cases that share the program
    comparisons: Comparisons | None = None
    output: Keys | None = None  # the output name's word key; 0 for cases with a single output

    def at(self, places: Places) -> Movers:
        """Return selected rows. Only valid without intervals."""
        columns = {name: getattr(self, name)[places] for name in _COLUMNS}
        return Movers(self.what, **columns, output=None if self.output is None else self.output[places])

    @property
    def decided(self) -> Mask:
        """Mask of changed numbers."""
        return np.greater_equal(self.state, _BETTER)

    @property
    def worse(self) -> Mask:
        """Mask of regressions."""
        return np.equal(self.state, _WORSE)

    @property
    def size(self) -> Floats:
        """Size of each change, as the logarithm of a factor.

        The sizes of all numbers are comparable: 20 dB are a factor of 10.
        """
        with np.errstate(all="ignore"):
            if self.what == "sqnr_db":
                size = np.abs(self.after - self.before) / 20 * math.log(10)
            else:
                plain = np.where(self.before != self.after, np.inf, 0.0)
                size = np.where(self.ratio > 0, np.abs(np.log(self.ratio)), plain)
        return np.nan_to_num(size, nan=np.inf, posinf=np.inf)

    def verdict(self, index: int) -> str:
        """Return the verdict text."""
        return (NOTHING, SAME, *WORDS[self.what])[self.state[index]]

    def explain(self, index: int) -> str:
        """Return the reason for the verdict on a device time."""
        if self.comparisons is None:
            return ""
        if self.state[index] == _UNTOLD:
            return f"fewer than {ITERATIONS} iterations, or grade F"
        if self.comparisons.told[index]:
            return "by interval"
        return "by the single-run rule" if self.state[index] >= _BETTER else "not enough samples for an interval"


def find_movers(a: SideCases, b: SideCases, pairs: Pairs) -> list[Movers]:
    """Return the numbers for cases on both sides, in :data:`NUMBERS` order."""
    both = pairs.both
    counts, sharing = _mask_sizes(a, b, pairs.before[both], pairs.after[both])
    sizes = _compare_values(a, b, pairs, both[counts], "artifact_bytes", sharing[counts])
    return [
        _compare_times(a, b, pairs, both),
        sizes,
        *(_compare_values(a, b, pairs, both, what) for what in NUMBERS[2:]),
    ]


def _mask_sizes(a: SideCases, b: SideCases, before: Places, after: Places) -> tuple[Mask, Places]:
    """Return a mask for cases with comparable program sizes, and the case count per program.

    The size of a program depends on all its cases. If the programs of both sides have the same cases, only the first
    case is shown.
    """
    (old, old_size, _), (new, new_size, first) = (_group_programs(side) for side in (a, b))
    was, now = old[before], new[after]
    # Programs have the same cases if the common count equals both case counts.
    _, which, common = np.unique(was * (b.size + 1) + now, return_inverse=True, return_counts=True)
    shared = common[which]
    same = (shared == old_size[was]) & (shared == new_size[now])
    return same & (first[now] == after), new_size[now]


def _group_programs(side: SideCases) -> tuple[Places, Places, Places]:
    """Return the program number per case, and per program the case count (latest samples) and the first case."""
    program = side.samples["program"][side.latest]
    # Program 0 is unknown, so such cases count as separate programs.
    own = np.where(program == 0, -1 - np.arange(program.size), program)
    _, first, which, count = np.unique(own, return_index=True, return_inverse=True, return_counts=True)
    return which, count, first


def _compare_times(a: SideCases, b: SideCases, pairs: Pairs, both: Places) -> Movers:
    """Compare device times.

    With enough samples, compare confidence intervals. Otherwise apply the rule of `hil suite diff`.
    """
    (old, was), (new, now) = (
        (read_device_times(side), places[both]) for side, places in ((a, pairs.before), (b, pairs.after))
    )
    there = (old.times.count[was] > 0) & (new.times.count[now] > 0)
    pair, was, now = both[there], was[there], now[there]
    before, after = old.times.median[was], new.times.median[now]
    measured = np.minimum(old.iterations[was], new.iterations[now]) >= ITERATIONS
    with np.errstate(all="ignore"):
        spreads = [
            spread_of(side.samples["device_p50_ns"][timed.used], side.case[timed.used], side.size)
            for side, timed in ((a, old), (b, new))
        ]
        found = compare_spreads(spreads[0].at(was), spreads[1].at(now), min_effect=DEFAULT_EFFECT, where=measured)
        p90 = np.where(before < after, old.p90_ns[was], new.p90_ns[now])
        changed = np.where(found.told, found.differs, time_changed(before, after, p90))
        ratio = np.where(found.told, found.ratio, after / before)
    state = np.where(changed, np.where(ratio > 1, _WORSE, _BETTER), _SAME)
    return Movers(
        "device_p50_ns",
        pair,
        before,
        after,
        np.where(measured, old.times.count[was], 0),
        np.where(measured, new.times.count[now], 0),
        ratio,
        np.where(measured, state, _UNTOLD).astype(np.int8),
        np.ones_like(pair),
        found,
    )


def _compare_values(
    a: SideCases, b: SideCases, pairs: Pairs, chosen: Places, what: str, cases: Places | None = None
) -> Movers:
    """Compare numbers with little variation.

    The values changed if the medians changed and the sides' ranges do not overlap.
    """
    column = "program_bytes" if what == "artifact_bytes" else what
    columns = [side.samples[column] for side in (a, b)]
    old, new = (read_values(side, values, ~np.isnan(values)) for side, values in zip((a, b), columns, strict=True))
    was, now = pairs.before[chosen], pairs.after[chosen]
    several = (a.several[was] | b.several[now]) & (what in OF_OUTPUTS)
    there = (old.count[was] > 0) & (new.count[now] > 0) & ~several
    before, after = old.at(was[there]), new.at(now[there])
    shared = np.ones_like(chosen[there]) if cases is None else cases[there]
    found = _judge_values(what, chosen[there], before, after, shared)
    if not several.any():
        return found
    outputs = pair_outputs(a, b, was[several], now[several], column)
    pair = chosen[several][outputs.pair]
    each = _judge_values(what, pair, outputs.before, outputs.after, np.ones_like(pair), outputs.output)
    return _merge_movers(found, each.at(_select_foremost(each)))


def _select_foremost(each: Movers) -> Places:
    """Return the row with the largest regression per pair, or with the largest change if a pair has no regression.

    Rows must be grouped by pair.
    """
    if not each.pair.size:
        return np.arange(0)
    starts = np.flatnonzero(np.append(True, np.diff(each.pair) != 0))
    which = np.cumsum(np.append(False, np.diff(each.pair) != 0))
    how = each.decided.astype(np.int8) + each.worse
    size = np.where(how == np.maximum.reduceat(how, starts)[which], each.size, -1.0)
    best = np.flatnonzero(size == np.maximum.reduceat(size, starts)[which])
    first: Places = best[np.append(True, np.diff(which[best]) != 0)]
    return first


def _judge_values(
    what: str, pair: Places, old: NumberValues, new: NumberValues, cases: Places, output: Keys | None = None
) -> Movers:
    before, after = old.median, new.median
    apart = (old.high < new.low) | (new.high < old.low)
    with np.errstate(all="ignore"):
        changed = apart & _mask_changed(what, before, after)
        ratio = np.where((before != 0) & (what != "sqnr_db"), after / before, np.nan)
    worse = after < before if what == "sqnr_db" else after > before
    state = np.where(changed, np.where(worse, _WORSE, _BETTER), _SAME).astype(np.int8)
    return Movers(what, pair, before, after, old.count, new.count, ratio, state, cases, output=output)


def _merge_movers(a: Movers, b: Movers) -> Movers:
    """Merge movers in the order of pairs. Only valid without intervals."""
    order = np.argsort(np.concatenate((a.pair, b.pair)), kind="stable")
    of_outputs = [np.zeros_like(one.pair) if one.output is None else one.output for one in (a, b)]
    columns: dict[str, Any] = {n: np.concatenate((getattr(a, n), getattr(b, n)))[order] for n in _COLUMNS}
    return Movers(a.what, **columns, output=np.concatenate(of_outputs)[order])


def _mask_changed(what: str, before: Floats, after: Floats) -> Mask:
    if what == "artifact_bytes":
        found = (before != 0) & (after != 0) & has_size_changed(before, after)
    elif what == "joules":
        # An energy of 0 or less is an error of the idle power.
        found = (before > 0) & (after > 0) & has_energy_changed(before, after)
    else:
        found = has_error_changed(before, after) if what == "max_abs" else has_sqnr_changed(before, after)
    return np.asarray(found, np.bool_)

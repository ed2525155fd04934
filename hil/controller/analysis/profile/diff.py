"""Compare two profiled runs: which run is faster, and which operations changed.

The verdict depends on the runs without a profiler. Profiled operation times are compared only if both runs used the
same profiler with little overhead. Otherwise only the shares of operations are shown, because a few microseconds of
profiler time per node make a fast run look slow.

Run times vary, so every ratio has a confidence interval. The interval is computed from the ranks of the iteration times
(Hodges and Lehmann, "Estimates of location based on rank tests", 1963). This method does not assume a normal
distribution, and is robust against outliers. The requested confidence applies to all intervals together, for any number
of operations. A change is reported only if the whole interval is beyond a margin. Intervals do not include effects on a
whole run, such as a hotter board. To exclude such effects, use ``hil bench A B``, which alternates the runs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hil.controller.analysis.profile.rows import join_list
from hil.controller.analysis.profile.totals import RunTimes, list_timed_runs, own_times, require_times, run_times
from hil.controller.records.commands.stored import OperationChange, OperationCost, ProfileComparison
from hil.core.timeline import OpRow, Profile

CONFIDENCE = 0.95
MARGIN = 0.05

# Maximum iterations per run. More iterations are subsampled, because the method uses all pairs.
_MAX_ITERATIONS = 400
# With more iterations, the rank sum is approximated by the normal distribution.
_MAX_EXACT = 30

Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class OpDiff:
    """An operation in both profiles, or a group of operations if the compilers fused the nodes differently."""

    name: str  # ONNX nodes joined by ``;``, or the operation's name without nodes
    # ``compute`` or ``runtime``, as in :class:`OpRow`; ``total`` for all operations, ``timed`` for the timed runs.
    kind: str
    # a_ops, b_ops: the runtime's names in both profiles; empty if missing.
    a_ops: tuple[str, ...]
    b_ops: tuple[str, ...]
    # a, b: the cost in both profiles; None if missing.
    a: OperationCost | None
    b: OperationCost | None
    # b's time divided by a's, the median over all iteration pairs; None if missing or incomparable.
    ratio: float | None = None
    # low, high: the ratio's confidence interval; None with too few iterations.
    low: float | None = None
    high: float | None = None
    change: str = ""  # ``slower``, ``faster``, ``only in a``, ``only in b``, or "" without a significant change

    @property
    def change_ns(self) -> float:
        """Change of the time per iteration from a to b in ns. It has no meaning if the times are incomparable."""
        return (self.b.p50_ns if self.b else 0.0) - (self.a.p50_ns if self.a else 0.0)


@dataclass(frozen=True)
class ProfileDiff:
    """Comparison between two profiles."""

    a: str
    b: str
    confidence: float  # for all intervals together
    margin: float  # 0.05 ignores changes below 5 %; for operations, the profiler's overhead is added
    a_times: RunTimes
    b_times: RunTimes
    timed: OpDiff  # timed runs, which give the verdict; the requested confidence applies to this interval alone
    incomparable: str  # why the profiled times cannot be compared; "" if they are comparable
    total: OpDiff
    ops: Sequence[OpDiff]  # operations with the largest change first; with the largest share first if incomparable

    @property
    def verdict(self) -> str:
        """A sentence that says which run is faster."""
        one = self.timed
        if one.a is None or one.b is None:
            return "cannot determine the faster run: missing timed run"
        if one.low is None:
            return "cannot determine the faster run: not enough timed iterations"
        if not one.change:
            return "no significant difference between the timed runs"
        return f"B is {one.change} than A: the timed run takes {one.ratio:.3g} times as long"

    def record(self, plot: Path | None = None, trace: Path | None = None) -> ProfileComparison:
        """Return the comparison as a record.

        Args:
            plot, trace: files that were written.
        """
        return ProfileComparison(
            a=self.a,
            b=self.b,
            confidence=self.confidence,
            margin=self.margin,
            verdict=self.verdict,
            incomparable=self.incomparable,
            a_overhead=self.a_times.overhead,
            b_overhead=self.b_times.overhead,
            timed=_record_operation(self.timed),
            total=_record_operation(self.total, self.incomparable),
            ops=[_record_operation(one, self.incomparable) for one in self.ops],
            plot=str(plot) if plot else None,
            trace=str(trace) if trace else None,
        )


def _record_operation(one: OpDiff, incomparable: str = "") -> OperationChange:
    return OperationChange(**vars(one), change_ns=None if incomparable else one.change_ns)


def compare_profiles(a: Profile, b: Profile, *, confidence: float = CONFIDENCE, margin: float = MARGIN) -> ProfileDiff:
    """Compare a model's profiles by operation: by ONNX nodes, or by name without nodes.

    Args:
        confidence: confidence level for all intervals together.
        margin: ignore changes below this ratio.

    Raises:
        UsageError: a profile has no times, because its board is emulated.
    """
    for profile in (a, b):
        require_times(profile)
    before, after = _Side.collect(a.rows), _Side.collect(b.rows)
    a_times, b_times = run_times(a), run_times(b)
    incomparable = _explain_incomparable(a, a_times, b, b_times)
    pairs = _pair_operations(before.keys, after.keys)
    # Bonferroni correction: the requested confidence applies to all intervals together.
    doubt = (1 - confidence) / (1 + sum(bool(mine and theirs) for mine, theirs in pairs))
    # Add the overhead to the margin, because the profiler may cause changes up to its overhead.
    added = max(0.0, *(times.overhead or 0.0 for times in (a_times, b_times)))
    beyond = (1 + margin) * (1 + added) - 1
    judge = functools.partial(_compare_pair, before, after, None if incomparable else doubt, beyond)
    found = _add_shares([judge(mine, theirs) for mine, theirs in pairs])
    ops = sorted(found, key=_get_max_share if incomparable else lambda one: abs(one.change_ns), reverse=True)
    total = dataclasses.replace(judge(before.keys, after.keys), name="total", kind="total", a_ops=(), b_ops=())
    timed = _compare_timed_runs(list_timed_runs(a), list_timed_runs(b), 1 - confidence, margin)
    return ProfileDiff(a.run, b.run, confidence, margin, a_times, b_times, timed, incomparable, total, ops)


def _explain_incomparable(a: Profile, a_times: RunTimes, b: Profile, b_times: RunTimes) -> str:
    # ``runtime`` contains name, version and device; the name is first.
    one, other = (profile.runtime.split(" ")[0] for profile in (a, b))
    if one != other:
        return f"A's times are from {one}'s profiler, B's from {other}'s"
    for name, times in (("A", a_times), ("B", b_times)):
        if times.overhead is None:
            return f"unknown profiler overhead for {name}: missing timed run"
        if times.is_distorted:
            return f"the profiler adds {times.overhead:.0%} to {name}'s runs"
    return ""


def _get_max_share(one: OpDiff) -> float:
    return max(cost.share for cost in (one.a, one.b) if cost is not None)


def _add_shares(found: Sequence[OpDiff]) -> list[OpDiff]:
    """Add every operation's share of the run, from the medians. A single outlier does not affect a median."""
    a, b = (
        sum(cost.p50_ns for cost in costs if cost) for costs in ([one.a for one in found], [one.b for one in found])
    )
    return [dataclasses.replace(one, a=_add_share(one.a, a), b=_add_share(one.b, b)) for one in found]


def _add_share(cost: OperationCost | None, whole: float) -> OperationCost | None:
    return cost and cost.replace(share=cost.p50_ns / whole if whole else 0.0)


def _compare_timed_runs(a: Sequence[int], b: Sequence[int], doubt: float, margin: float) -> OpDiff:
    """Compare the runs without a profiler."""
    before, after = (np.array(times, np.float64) for times in (a, b))
    mine, theirs = (_compute_cost(times) if len(times) else None for times in (before, after))
    one = OpDiff("timed run", "timed", (), (), mine, theirs)
    return _add_ratio(one, before, after, doubt, margin) if mine and theirs else one


class _Key(NamedTuple):
    """The identity of an operation across runs: its nodes, or its name without nodes."""

    kind: str
    nodes: tuple[str, ...]
    name: str


_Pair = tuple[list[_Key], list[_Key]]


@dataclass
class _Side:
    """A profile: times by operation and iteration, and the operations' names."""

    times: dict[_Key, dict[int, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))
    ops: dict[_Key, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    iterations: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    @classmethod
    def collect(cls, rows: Iterable[OpRow]) -> _Side:
        side = cls()
        for row, own_ns in own_times(rows):
            key = _Key(row.kind, row.onnx_nodes, "" if row.onnx_nodes else row.op)
            side.times[key][row.iteration] += own_ns
            side.ops[key][row.op] = None
            side.iterations[row.iteration] += own_ns
        return side

    @property
    def keys(self) -> list[_Key]:
        return list(self.times)

    def sum_times(self, keys: Sequence[_Key]) -> Times:
        """Return some operations' total time per iteration; 0 if no operation ran."""
        return np.array([sum(self.times[key].get(one, 0) for key in keys) for one in self.iterations], np.float64)

    def list_names(self, keys: Sequence[_Key]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for key in keys for name in self.ops[key]))


def _pair_operations(a: Sequence[_Key], b: Sequence[_Key]) -> list[_Pair]:
    """Return the operation groups to compare.

    Operations with equal keys are pairs. Other operations with common nodes form groups, because the compilers fused
    the nodes differently. Operations without a match are in one profile only.
    """
    both = set(a) & set(b)
    pairs: list[_Pair] = [([key], [key]) for key in a if key in both]
    groups: list[tuple[set[str], list[_Key], list[_Key]]] = []
    alone: list[_Pair] = [([key], []) for key in a if key not in both] + [([], [key]) for key in b if key not in both]
    for mine, theirs in alone:
        nodes = {node for key in (*mine, *theirs) for node in key.nodes}
        linked = [group for group in groups if group[0] & nodes]
        groups = [group for group in groups if not group[0] & nodes]
        of_a, of_b = [key for _, keys, _ in linked for key in keys], [key for _, _, keys in linked for key in keys]
        groups.append((nodes.union(*(group[0] for group in linked)), of_a + mine, of_b + theirs))
    pairs += [(mine, theirs) for _, mine, theirs in groups if mine and theirs]
    # If the other profile has none of a group's nodes, the operations of the group stay separate.
    pairs += [([key], []) for _, mine, theirs in groups if not theirs for key in mine]
    pairs += [([], [key]) for _, mine, theirs in groups if not mine for key in theirs]
    return pairs


def _compare_pair(
    before: _Side, after: _Side, doubt: float | None, margin: float, mine: Sequence[_Key], theirs: Sequence[_Key]
) -> OpDiff:
    first = next(iter((*mine, *theirs)), _Key("", (), ""))
    nodes = dict.fromkeys(node for key in (*mine, *theirs) for node in key.nodes)
    alone = "" if mine and theirs else "only in a" if mine else "only in b" if theirs else ""
    one = OpDiff(
        name=join_list(tuple(nodes)) or first.name,
        kind=first.kind,
        a_ops=before.list_names(mine),
        b_ops=after.list_names(theirs),
        a=_compute_cost(before.sum_times(mine)) if mine else None,
        b=_compute_cost(after.sum_times(theirs)) if theirs else None,
        change=alone,
    )
    if doubt is None or not mine or not theirs:
        return one
    return _add_ratio(one, before.sum_times(mine), after.sum_times(theirs), doubt, margin)


def _compute_cost(times: Times) -> OperationCost:
    return OperationCost(p50_ns=float(np.median(times)), mean_ns=float(times.mean()), share=1.0, iterations=len(times))


def _add_ratio(one: OpDiff, before: Times, after: Times, doubt: float, margin: float) -> OpDiff:
    """Add the ratio b / a, the interval, and the change."""
    ratio, low, high = _compute_ratio(before, after, doubt)
    change = ""
    if low is not None and high is not None:
        change = "slower" if low > 1 + margin else "faster" if high < 1 / (1 + margin) else ""
    return dataclasses.replace(one, ratio=ratio, low=low, high=high, change=change)


def _compute_ratio(a: Times, b: Times, doubt: float) -> tuple[float, float | None, float | None]:
    """Return the median ratio b / a, and an interval with error probability ``doubt``."""
    thinned = (times[:: -(-len(times) // _MAX_ITERATIONS)] for times in (a, b))
    a, b = (np.log(np.maximum(times, 1.0)) for times in thinned)
    ratios = np.sort(np.subtract.outer(b, a), axis=None)
    middle = math.exp(float(np.median(ratios)))
    outside = _count_outside(len(a), len(b), doubt)
    if outside is None:
        return middle, None, None
    return middle, math.exp(float(ratios[outside])), math.exp(float(ratios[-1 - outside]))


@functools.lru_cache(64)
def _count_outside(n: int, m: int, doubt: float) -> int | None:
    """Return the number of ratios outside the interval at each end, or None for too few times.

    This is the largest number U such that the rank statistic is at most U with a probability of at most ``doubt / 2``.
    """
    if max(n, m) > _MAX_EXACT:
        deviations = NormalDist().inv_cdf(doubt / 2)
        found = math.floor(n * m / 2 - 0.5 + deviations * math.sqrt(n * m * (n + m + 1) / 12))
    else:
        allowed = doubt / 2 * math.comb(n + m, n)
        found = sum(orders <= allowed for orders in itertools.accumulate(_count_orders(n, m))) - 1
    return found if found >= 0 else None


def _count_orders(n: int, m: int) -> list[int]:
    """Return the number of orders of n and m times with U = 0, 1, ... n * m: the Gaussian binomial coefficients."""
    counts = [1] + [0] * (n * m)
    for i in range(1, n + 1):
        # Multiply by 1 - x^(m + i), and divide by 1 - x^i.
        for u in range(n * m, m + i - 1, -1):
            counts[u] -= counts[u - m - i]
        for u in range(i, n * m + 1):
            counts[u] += counts[u - i]
    return counts

"""Compute the distance of a profile to the roofline (Williams, Waterman and Patterson, "Roofline", 2009).

The shortest time of an operation is the longer of two times: its operations at the compute peak, and the bytes at the
memory peak. The attained share is the shortest time divided by the measured time. For an operation with operations and
bytes, this is the usual definition: the measured speed divided by the roof at its intensity.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hil.controller.analysis.profile.totals import GROUPS, list_timed_runs, own_times, run_times
from hil.controller.devices.measuring.time_statistics import Nanoseconds, compute_median_interval
from hil.controller.records.base import Interval
from hil.controller.records.measurements.roofline import (
    BoardPeaks,
    Bound,
    ModelWork,
    PeakType,
    PeakValue,
    RooflineRow,
    UncountedWork,
)
from hil.core.timeline import OpRow, Profile

ABOVE_PEAK = "above the measured peak"
_FLOATS = {"f32", "f64"}
_BYTES = {"i8", "si8", "ui8", "u8"}
# Element type at the end of a shape: ``1x64xf32``, or a scalar ``f32``.
_TYPE = re.compile(r"(?:^|x)([a-z]+\d+)$")
# Largest factor between a peak and the lower end of its interval.
_MAX_SPREAD = 1e6
# Longest duration: 146 years.
_MAX_NS = 1 << 62
# Number of names to list in a warning.
_NAMED = 3


@dataclass
class _WorkSums:
    """Sums over a group's rows."""

    kind: str
    runs: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # iteration -> exclusive time in ns
    nodes: dict[str, None] = field(default_factory=dict)
    op_types: dict[str, None] = field(default_factory=dict)
    flops: int | None = 0
    bytes: int | None = 0
    # Sums of the shortest times in ns. None if unknown.
    shortest_ns: float | None = 0.0
    low_ns: float | None = 0.0
    high_ns: float | None = 0.0
    bound_ns: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    dtypes: set[PeakType] = field(default_factory=set)


@dataclass(frozen=True)
class _Limit:
    """Shortest time of an operation, with the times at both ends of the peaks' intervals."""

    shortest_ns: float
    low_ns: float
    high_ns: float
    bound: Bound


@dataclass(frozen=True)
class Roofline:
    """Rows of a profile below the roofline."""

    whole: RooflineRow
    rows: Sequence[RooflineRow]  # longest time first
    uncounted: UncountedWork
    warnings: Sequence[str]


def compute_roofline(
    profile: Profile, peaks: BoardPeaks | None, *, by: str = "op", work: ModelWork | None = None
) -> Roofline:
    """Compare a profile with the peaks of its board.

    Args:
        peaks: None computes only work and speed.
        by: key of :data:`hil.controller.analysis.profile.totals.GROUPS`.
        work: the work of the model, for a profile without operations.
    """
    groups: dict[tuple[str, str], _WorkSums] = {}
    own = _WorkSums("compute")
    for row, own_ns in own_times(profile.rows):
        key = GROUPS[by](row), row.kind
        group = groups.setdefault(key, _WorkSums(row.kind))
        _add_row(group, row, own_ns, peaks)
        if row.kind == "compute":
            _add_row(own, row, own_ns, peaks, partial=True)
    iterations = sorted({number for group in groups.values() for number in group.runs})
    total = sum(_get_median(group, iterations) for group in groups.values())
    rows = [_make_row(name, group, iterations, total) for (name, _), group in groups.items()]
    rows.sort(key=lambda row: -(row.time_ns or 0.0))
    whole = _make_whole(profile, own, iterations, work, peaks)
    uncounted = _count_uncounted(groups, iterations, total)
    if not own.runs and work is not None:
        uncounted = _count_uncounted_work(work)
    return Roofline(whole, rows, uncounted, _list_warnings(rows, whole, uncounted, peaks))


def find_dtype(shapes: str) -> PeakType | None:
    """Return the type of the compute peak for an operation's shapes; None if its arithmetic has no such peak.

    A float32 input decides: a program that converts int8 weights computes in float32.
    """
    inputs, _, outputs = shapes.partition(" -> ")
    found = {match[1] for text in inputs.split(", ") if (match := _TYPE.search(text.strip()))}
    found = found or {match[1] for text in outputs.split(", ") if (match := _TYPE.search(text.strip()))}
    if found & _FLOATS or not found:
        return "f32"
    if "f16" in found:
        return "f16"
    if found & _BYTES:
        return "int8"
    return None if "bf16" in found else "f32"


def limit_time(flops: int | None, moved: int | None, dtype: PeakType | None, peaks: BoardPeaks | None) -> _Limit | None:
    """Return the shortest time of an operation; None if the work or the peak is unknown.

    Without a peak of the memory, only the compute peak limits the time.
    """
    if peaks is None or flops is None or moved is None:
        return None
    compute = peaks.compute.get(dtype) if dtype else None
    if flops and compute is None:
        return None
    options: list[tuple[Bound, float, PeakValue | None]] = [
        ("compute", float(flops), compute),
        ("memory", float(moved), peaks.memory),
    ]
    times = []
    for bound, amount, value in options:
        if value is not None:
            low, high = _get_ends(value)
            times.append((bound, 1e9 * amount / value.rate, 1e9 * amount / high, 1e9 * amount / low))
    if not times:
        return None
    longest = max(times, key=lambda one: one[1])
    return _Limit(longest[1], max(one[2] for one in times), max(one[3] for one in times), longest[0])


def _get_ends(value: PeakValue) -> tuple[float, float]:
    """Return the ends of a peak's interval, or the peak without a usable interval. A file may contain any number."""
    found = value.interval
    if found is None or not value.rate / _MAX_SPREAD <= found.low <= value.rate <= found.high:
        return value.rate, value.rate
    return found.low, found.high


def _add_row(group: _WorkSums, row: OpRow, own_ns: int, peaks: BoardPeaks | None, *, partial: bool = False) -> None:
    """Add a row. With ``partial``, skip unknown work instead of making the sums unknown."""
    group.runs[row.iteration] += own_ns
    group.nodes.update(dict.fromkeys(row.onnx_nodes))
    group.op_types.update(dict.fromkeys(row.op_types))
    dtype = find_dtype(row.shapes)
    limit = limit_time(row.flops, row.bytes, dtype, peaks)
    is_counted = row.flops is not None and row.bytes is not None
    if partial and not is_counted:
        return
    group.flops = None if group.flops is None or row.flops is None else group.flops + row.flops
    group.bytes = None if group.bytes is None or row.bytes is None else group.bytes + row.bytes
    if row.flops and dtype is not None:
        group.dtypes.add(dtype)
    if limit is None:
        if not partial:
            group.shortest_ns = None
        return
    if group.shortest_ns is not None and group.low_ns is not None and group.high_ns is not None:
        group.shortest_ns += limit.shortest_ns
        group.low_ns += limit.low_ns
        group.high_ns += limit.high_ns
    group.bound_ns[limit.bound] += limit.shortest_ns


def _get_median(group: _WorkSums, iterations: Sequence[int]) -> float:
    return float(np.median([group.runs.get(number, 0) for number in iterations])) if iterations else 0.0


def _make_durations(times_ns: Sequence[int]) -> Nanoseconds:
    """Return durations as an array. Profiles of other users may contain any number."""
    return np.array([min(max(one, 0), _MAX_NS) for one in times_ns], np.int64)


def _make_row(name: str, group: _WorkSums, iterations: Sequence[int], total: float) -> RooflineRow:
    times = _make_durations([group.runs.get(number, 0) for number in iterations])
    time_ns = float(np.median(times)) if times.size else None
    return _build_row(
        name,
        "compute" if group.kind == "compute" else "runtime",
        group,
        len(iterations),
        time_ns=time_ns,
        interval=compute_median_interval(times),
        share=(time_ns or 0.0) / total if total else 0.0,
    )


def _make_whole(
    profile: Profile, own: _WorkSums, iterations: Sequence[int], work: ModelWork | None, peaks: BoardPeaks | None
) -> RooflineRow:
    """Return the row of the whole model. Its time is the time without the profiler, if it was measured."""
    timed = _make_durations(list_timed_runs(profile))
    time_ns = float(np.median(timed)) if timed.size else run_times(profile).profiled_p50_ns
    group, runs = own, len(iterations)
    if not own.runs and work is not None:
        # The runtime does not profile operations: use the work that the shapes of the model imply.
        group, runs = sum_model_work(work, peaks), 1
    interval = compute_median_interval(timed) if timed.size else None
    return _build_row(profile.model, "model", group, runs, time_ns=time_ns, interval=interval, share=1.0)


def sum_model_work(work: ModelWork, peaks: BoardPeaks | None) -> _WorkSums:
    """Return the sums of a model's counted operators."""
    group = _WorkSums("compute")
    for one in work.operators:
        row = OpRow(
            *("", 0, "", "", one.name, "compute", (), (one.op_type,), 0, 0),
            shapes=one.shapes,
            bytes=one.bytes,
            flops=one.flops,
        )
        _add_row(group, row, 0, peaks, partial=True)
    return group


def _build_row(
    name: str,
    kind: str,
    group: _WorkSums,
    runs: int,
    *,
    time_ns: float | None,
    interval: Interval | None,
    share: float,
) -> RooflineRow:
    """Return a row. The group's work covers ``runs`` iterations."""
    runs = max(runs, 1)
    is_model_work = kind != "runtime"
    flops = group.flops // runs if group.flops is not None and is_model_work else None
    moved = group.bytes // runs if group.bytes is not None and is_model_work else None
    shortest = group.shortest_ns / runs if group.shortest_ns and is_model_work and group.bound_ns else None
    bound: Bound = ""
    if group.bound_ns and shortest is not None:
        bound = "compute" if group.bound_ns["compute"] >= group.bound_ns["memory"] else "memory"
    attained, ends = None, None
    if shortest is not None and time_ns:
        attained = shortest / time_ns
        low, high = (group.low_ns or 0.0) / runs, (group.high_ns or 0.0) / runs
        slow, fast = (interval.high, interval.low) if interval else (time_ns, time_ns)
        if interval is not None and fast > 0:
            ends = Interval(low=low / slow, high=high / fast, level=interval.level)
    return RooflineRow(
        name=name,
        kind="model" if kind == "model" else "compute" if kind == "compute" else "runtime",
        onnx_nodes=list(group.nodes),
        op_types=list(group.op_types),
        dtype=next(iter(group.dtypes)) if len(group.dtypes) == 1 else "",
        time_ns=time_ns,
        time=interval,
        share=share,
        flops=flops,
        bytes=moved,
        intensity=flops / moved if flops is not None and moved else None,
        flops_per_s=1e9 * flops / time_ns if flops is not None and time_ns else None,
        bytes_per_s=1e9 * moved / time_ns if moved is not None and time_ns else None,
        bound=bound,
        roof_flops_per_s=1e9 * flops / shortest if flops and shortest else None,
        shortest_ns=shortest,
        attained=attained,
        interval=ends,
        is_above=attained is not None and (ends.low if ends else attained * _get_margin(group)) > 1,
    )


def _get_margin(group: _WorkSums) -> float:
    """Return the shortest time at the upper ends of the peaks' intervals, relative to the shortest time."""
    return group.low_ns / group.shortest_ns if group.low_ns and group.shortest_ns else 1.0


def _count_uncounted(
    groups: Mapping[tuple[str, str], _WorkSums], iterations: Sequence[int], total: float
) -> UncountedWork:
    missing = {
        name: group
        for (name, kind), group in groups.items()
        if kind == "compute" and (group.flops is None or group.bytes is None)
    }
    types = dict.fromkeys(one for name, group in missing.items() for one in (list(group.op_types) or [name]))
    runtime = [group for (_, kind), group in groups.items() if kind != "compute"]
    return UncountedWork(
        operators=len(missing),
        share=_sum_shares(missing.values(), iterations, total),
        op_types=list(types),
        runtime_share=_sum_shares(runtime, iterations, total),
    )


def _count_uncounted_work(work: ModelWork) -> UncountedWork:
    return UncountedWork(
        operators=sum(work.not_counted.values()), share=None, op_types=list(work.not_counted), runtime_share=0.0
    )


def _sum_shares(groups: Iterable[_WorkSums], iterations: Sequence[int], total: float) -> float:
    return min(sum(_get_median(group, iterations) for group in groups) / total, 1.0) if total else 0.0


def _list_warnings(
    rows: Sequence[RooflineRow], whole: RooflineRow, uncounted: UncountedWork, peaks: BoardPeaks | None
) -> list[str]:
    found = []
    above = [row for row in rows if row.is_above] or [row for row in [whole] if row.is_above]
    if above and peaks is not None:
        names = ", ".join(row.name for row in above[:_NAMED]) + (
            f" and {len(above) - _NAMED} more" * (len(above) > _NAMED)
        )
        is_cached = all(row.bound == "memory" for row in above)
        cause = " (data that fits into the caches is faster than the memory)" if is_cached else ""
        found.append(f"{ABOVE_PEAK}: {names}{cause}: measure the peak again with hil board peak {peaks.board}")
    if uncounted.operators:
        count = f"{uncounted.operators} operation{'s' * (uncounted.operators > 1)}"
        share = "" if uncounted.share is None else f", {uncounted.share:.1%} of the time"
        names = ", ".join(uncounted.op_types[:_NAMED])
        found.append(f"not counted: {count}{share} ({names}): the model's sums are lower limits")
    unknown = [row for row in rows if row.kind == "compute" and row.flops and row.bytes and row.shortest_ns is None]
    if unknown and peaks is not None:
        types = ", ".join(sorted({row.dtype or "other types" for row in unknown}))
        found.append(f"no measured peak for {types}: measure it with hil board peak {peaks.board} --dtype TYPE")
    return found

"""Changes of the iteration time during a sustained measurement: pure functions of the batches' statistics.

A sustained measurement can take hours. Therefore hil keeps statistics of all iterations of a batch, but at most
about :data:`MAX_SAMPLES` iterations, evenly spaced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hil.controller.analysis.bench.stats import Batch
from hil.controller.devices.measuring.time_statistics import Nanoseconds
from hil.controller.records.measurements.bench import SustainedTimes, SustainedWindow, ThrottlingStart
from hil.core.timeline import Sample

MAX_SAMPLES = 200_000
MAX_WINDOWS = 60
# Batches at the beginning, whose median is the time before throttling. A batch takes at most half a second.
_FIRST_BATCHES = 5
# Share of the batches at the end, whose median is the final time.
_LAST_SHARE = 0.1
# A slowdown is lasting if the first batches after its start are slow, and most of the later batches too.
_SLOW_IN_SEQUENCE = 3
_SLOW_SHARE = 0.9
# Start of an event's text, from :func:`hil.controller.devices.health.list_changes`.
_THROTTLED = "the board throttled"


@dataclass(frozen=True)
class BatchSummary:
    """Statistics of all iterations of a batch.

    Attributes:
        start_ns, end_ns: start of the first iteration and end of the last iteration, on the clock of the times.
        events: changes of the board since the batch before.
    """

    start_ns: int
    end_ns: int
    iterations: int
    median_ns: float
    events: tuple[str, ...] = ()


def summarise_batch(batch: Batch, events: Sequence[str]) -> BatchSummary:
    """Return the statistics of a batch. Only the first 10 events are kept."""
    return BatchSummary(
        start_ns=int(batch.start_ns[0]),
        end_ns=int(batch.start_ns[-1] + batch.duration_ns[-1]),
        iterations=int(batch.duration_ns.size),
        median_ns=float(np.median(batch.duration_ns)),
        events=tuple(events[:10]),
    )


def find_stride(sustained_s: float, each_s: float) -> int:
    """Return the distance between stored iterations, so that about :data:`MAX_SAMPLES` are stored."""
    return max(1, math.ceil(sustained_s / each_s / MAX_SAMPLES))


def thin_batch(batch: Batch, stride: int) -> Batch:
    """Return a batch with every ``stride``-th iteration, at least one."""
    # Copy, because a slice keeps the memory of the whole array.
    starts, durations = (values[::stride].copy() for values in (batch.start_ns, batch.duration_ns))
    return replace(batch, start_ns=starts, duration_ns=durations, instructions=batch.instructions[::stride])


def measure_elapsed(batches: Sequence[BatchSummary]) -> float:
    """Return the seconds from the first start to the last end."""
    return (batches[-1].end_ns - batches[0].start_ns) / 1e9 if batches else 0.0


def summarise_sustained(
    batches: Sequence[BatchSummary],
    kept: Sequence[Batch],
    counters: Sequence[Sample],
    *,
    requested_s: float,
    min_effect: float,
) -> SustainedTimes | None:
    """Return how the iteration times changed during the measurement, or None without batches.

    Args:
        kept: the kept iterations of each batch.
        counters: frequencies and temperatures of the board, on the clock of the times.
        min_effect: the smallest relative slowdown to report.
    """
    if not batches:
        return None
    medians = np.array([one.median_ns for one in batches])
    last = max(1, round(_LAST_SHARE * medians.size))
    return SustainedTimes(
        requested_s=requested_s,
        measured_s=measure_elapsed(batches),
        iterations=sum(one.iterations for one in batches),
        first_ns=float(np.median(medians[:_FIRST_BATCHES])),
        last_ns=float(np.median(medians[-last:])),
        throttling=find_throttling(batches, min_effect=min_effect),
        windows=_build_windows(batches, kept, counters),
    )


def find_throttling(batches: Sequence[BatchSummary], *, min_effect: float) -> ThrottlingStart | None:
    """Return where throttling begins: the first event of the board, or the first batch of a lasting slowdown."""
    medians = np.array([one.median_ns for one in batches])
    events = [(at, text) for at, one in enumerate(batches) for text in one.events if text.startswith(_THROTTLED)]
    slowdown = _find_slowdown(medians, min_effect)
    starts = [at for at, _ in events[:1]] + ([] if slowdown is None else [slowdown])
    if not starts:
        return None
    start = min(starts)
    return ThrottlingStart(
        start_s=(batches[start].start_ns - batches[0].start_ns) / 1e9,
        event=events[0][1] if events else "",
        before_ns=float(np.median(medians[: max(start, 1)])),
        after_ns=float(np.median(medians[start:])),
    )


def _find_slowdown(medians: np.ndarray[tuple[int], np.dtype[np.float64]], min_effect: float) -> int | None:
    """Return the index of the first batch of a lasting slowdown."""
    slow = medians > np.median(medians[:_FIRST_BATCHES]) * (1 + min_effect)
    shares = slow[::-1].cumsum()[::-1] / np.arange(slow.size, 0, -1)
    for start in np.flatnonzero(slow & (shares >= _SLOW_SHARE)).tolist():
        sequence = slow[start : start + _SLOW_IN_SEQUENCE]
        is_sequence = sequence.size == _SLOW_IN_SEQUENCE and bool(sequence.all())
        before, after = np.median(medians[: max(start, 1)]), np.median(medians[start:])
        if is_sequence and after > before * (1 + min_effect):
            return int(start)
    return None


def _build_windows(
    batches: Sequence[BatchSummary], kept: Sequence[Batch], counters: Sequence[Sample]
) -> list[SustainedWindow]:
    """Return at most :data:`MAX_WINDOWS` windows of consecutive batches."""
    looks = _group_by_look(counters)
    windows = []
    for part in np.array_split(np.arange(len(batches)), min(MAX_WINDOWS, len(batches))):
        first, last = int(part[0]), int(part[-1])
        durations: Nanoseconds = np.concatenate([kept[at].duration_ns for at in range(first, last + 1)])
        p10, p50, p90 = (float(value) for value in np.percentile(durations, (10, 50, 90)))
        # Windows are adjacent: a counter between two batches belongs to the window before.
        end_ns = batches[last + 1].start_ns if last + 1 < len(batches) else batches[last].end_ns + 1
        found = [sample for at, sample in looks if batches[first].start_ns <= at < end_ns]
        clocks, degrees = ([one[unit] for one in found if unit in one] for unit in ("MHz", "degC"))
        windows.append(
            SustainedWindow(
                start_s=(batches[first].start_ns - batches[0].start_ns) / 1e9,
                iterations=sum(one.iterations for one in batches[first : last + 1]),
                p10_ns=p10,
                p50_ns=p50,
                p90_ns=p90,
                low_mhz=min(clocks, default=None),
                high_mhz=max(clocks, default=None),
                high_degc=max(degrees, default=None),
            )
        )
    return windows


def select_counters(counters: Sequence[Sample]) -> list[Sample]:
    """Return the frequencies and temperatures. Limits of the frequency are not frequencies."""
    units = ("MHz", "degC")
    return [one for one in counters if one.unit in units and not one.name.endswith(" highest frequency")]


def _group_by_look(counters: Sequence[Sample]) -> list[tuple[int, dict[str, float]]]:
    """Return the fastest clock and the highest temperature each time the counters were read, in time order."""
    looks: dict[int, dict[str, float]] = {}
    for one in counters:
        values = looks.setdefault(one.at_ns, {})
        values[one.unit] = max(one.value, values.get(one.unit, one.value))
    return sorted(looks.items(), key=lambda look: look[0])

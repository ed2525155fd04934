"""Points and lines of a roofline plot, with logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hil.controller.records.measurements.roofline import BoardPeaks, RooflineReport, RooflineRow

_MARGIN = 2.0  # factor between the extreme points and the borders


@dataclass(frozen=True)
class Roof:
    """Roof of a type: the memory's slope up to the ridge, then the compute peak."""

    name: str
    line: Sequence[tuple[float, float]]  # (operations per byte, operations per second)


@dataclass(frozen=True)
class RoofPoint:
    """Operations in the plot."""

    x: float  # operations per byte
    y: float  # operations per second
    row: RooflineRow


@dataclass(frozen=True)
class RoofChart:
    """Plot with values in operations per byte, and operations per second."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    roofs: Sequence[Roof]
    points: Sequence[RoofPoint]  # the whole model first, then the longest operations


def build_chart(report: RooflineReport) -> RoofChart | None:
    """Return the plot of a report; None if no operation has an intensity and a speed."""
    rows = [report.whole, *(row for row in report.rows if row.kind == "compute")]
    points = [RoofPoint(row.intensity, row.flops_per_s, row) for row in rows if row.intensity and row.flops_per_s]
    # Tables of other users may contain negative numbers.
    points = [point for point in points if 0 < point.x < math.inf and 0 < point.y < math.inf]
    if not points:
        return None
    peaks = report.peaks
    xs, ys = [point.x for point in points], [point.y for point in points]
    if peaks is not None:
        ys += [value.rate for value in peaks.compute.values()]
        if peaks.memory is not None:
            xs += [value.rate / peaks.memory.rate for value in peaks.compute.values()]
    x_range = _widen(min(xs), max(xs))
    y_range = _widen(min(ys), max(ys))
    roofs = _list_roofs(peaks, x_range, y_range) if peaks is not None else []
    return RoofChart(x_range, y_range, roofs, points)


def _widen(low: float, high: float) -> tuple[float, float]:
    return low / _MARGIN, high * _MARGIN


def _list_roofs(peaks: BoardPeaks, x_range: tuple[float, float], y_range: tuple[float, float]) -> list[Roof]:
    roofs = []
    for name, value in peaks.compute.items():
        if peaks.memory is None:
            roofs.append(Roof(name, [(x_range[0], value.rate), (x_range[1], value.rate)]))
            continue
        # Begin the slope where it enters the plot.
        ridge = value.rate / peaks.memory.rate
        start = min(max(x_range[0], y_range[0] / peaks.memory.rate), ridge)
        line = [(start, start * peaks.memory.rate), (ridge, value.rate)]
        roofs.append(Roof(name, [*line, (x_range[1], value.rate)]))
    if not roofs and peaks.memory is not None:
        start = max(x_range[0], y_range[0] / peaks.memory.rate)
        end = min(x_range[1], y_range[1] / peaks.memory.rate)
        if start < end:
            roofs.append(Roof("memory", [(start, start * peaks.memory.rate), (end, end * peaks.memory.rate)]))
    return roofs


def get_share(value: float, limits: tuple[float, float]) -> float:
    """Return the position of a value on a logarithmic axis, from 0 to 1."""
    low, high = map(math.log, limits)
    return min(max((math.log(value) - low) / (high - low), 0.0), 1.0)


def list_ticks(limits: tuple[float, float], most: int = 6) -> list[float]:
    """Return the powers of ten within the limits, at most about ``most``."""
    first, last = math.ceil(math.log10(limits[0])), math.floor(math.log10(limits[1]))
    step = max(math.ceil((last - first + 1) / most), 1)
    return [10.0**exponent for exponent in range(first, last + 1, step)]

"""Convert a history to a chart's JSON data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hil.controller.analysis.steps import Level
from hil.controller.web.index.series import HistoryFilter, HistoryMeasure, Point, Series
from hil.controller.web.text.entries import find_worst_kind

UNITS = {"device_p50_ns": "ns", "host_s": "s", "compile_s": "s", "program_bytes": "B", "joules": "J", "sqnr_db": "dB"}


def make_case_chart(
    series: Series, measure: HistoryMeasure, asked: HistoryFilter, remarks: Mapping[int, Any]
) -> dict[str, Any]:
    """Return the chart for a case's history. ``remarks`` maps point indices to remarks."""
    places, labels = _place_points(series.points, asked.x)
    chart = _make_chart(
        measure.title,
        UNITS.get(measure.column, ""),
        places,
        labels,
        [one.value for one in series.points],
        series.judged,
        series.levels,
    )
    chart["kinds"] = [find_worst_kind([one.outcome], finished=True) for one in series.points]
    chart["steps"] = [{"at": one.index, "worse": one.worse} for one in series.steps]
    chart["remarks"] = sorted(remarks)
    return _arrange_points(chart)


def _make_chart(
    title: str,
    unit: str,
    places: Sequence[float | None],
    labels: Sequence[str],
    values: Sequence[float | None],
    judged: Sequence[int],
    levels: Sequence[Level],
) -> dict[str, Any]:
    lines: dict[str, list[float | None]] = {name: [None] * len(values) for name in ("median", "low", "high")}
    for level in levels:
        for index in judged[level.start : level.end]:
            for name, line in lines.items():
                line[index] = getattr(level, name)
    known = [value if value is not None and math.isfinite(value) else None for value in values]
    told = set(judged)
    return {
        "title": title,
        "unit": unit,
        "x": list(places),
        "labels": list(labels),
        "values": [value if index in told else None for index, value in enumerate(known)],
        "others": [None if index in told else value for index, value in enumerate(known)],
        **lines,
        "kinds": [],
        "steps": [],
        "remarks": [],
    }


def make_plain_chart(
    title: str,
    unit: str,
    times: Sequence[float | None],
    values: Sequence[float | None],
    judged: Sequence[int],
    levels: Sequence[Level],
    worse: int,
    kinds: Sequence[str],
    remarks: Sequence[int] = (),
    **more: Any,
) -> dict[str, Any]:
    """Return the chart for a series over time that does not belong to a case.

    Args:
        worse: 1 if larger values are worse, -1 if smaller values are worse.
        more: ``bars``, ``names`` and ``confirmed`` of the points, in the order of ``times``.
    """
    chart = _make_chart(title, unit, times, [], values, judged, levels)
    chart |= {"kinds": list(kinds), "remarks": list(remarks), **more}
    chart["steps"] = [
        {"at": judged[now.start], "worse": (now.median - was.median) * worse > 0}
        for was, now in itertools.pairwise(levels)
    ]
    return _arrange_points(chart)


def _place_points(points: Sequence[Point], by: str) -> tuple[Sequence[float | None], list[str]]:
    """Return the points' x coordinates, and the axis labels. Labels are empty if x is a time.

    A point without a start time has no place on a time axis.
    """
    if not by or by == "time":
        return [one.created for one in points], []
    if by == "session":
        return [float(index) for index in range(len(points))], [one.id for one in points]
    names = [(one.commit if by == "commit" else "", label_of(one, by)) for one in points]
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [float(order[name]) for name in names], [label for _, label in order]


def label_of(point: Point, by: str) -> str:
    """Return a point's label on an axis with commits, compilers or package versions."""
    if by == "commit":
        return point.commit[:9] or "no commit"
    if by == "compiler":
        return point.compilers or "no compiler"
    return f"{by} {point.versions.get(by, '-')}"


_LISTS = ("x", "values", "others", "median", "low", "high", "kinds", "names")
_INDICES = ("remarks", "confirmed")


def _arrange_points(chart: dict[str, Any]) -> dict[str, Any]:
    """Return the chart with points sorted by x, without the points that have no x. ``untimed`` is their number."""
    places = chart["x"]
    order = sorted((index for index, x in enumerate(places) if x is not None), key=lambda index: places[index])
    chart["untimed"] = len(places) - len(order)
    if order == list(range(len(places))):
        return chart
    new = {old: place for place, old in enumerate(order)}
    for name in _LISTS:
        if chart.get(name):
            chart[name] = [chart[name][index] for index in order]
    if "bars" in chart:
        chart["bars"] = [[ends[index] for index in order] for ends in chart["bars"]]
    chart["steps"] = [{**one, "at": new[one["at"]]} for one in chart["steps"] if one["at"] in new]
    for name in _INDICES:
        if name in chart:
            chart[name] = sorted(new[one] for one in chart[name] if one in new)
    return chart

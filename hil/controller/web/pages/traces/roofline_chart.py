"""Place the points and lines of a roofline plot in an SVG image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hil.controller.analysis.profile.show import format_si
from hil.controller.analysis.roofline.chart import build_chart, get_share, list_ticks
from hil.controller.analysis.roofline.show import format_attained
from hil.controller.records.measurements.roofline import RooflineReport

WIDTH, HEIGHT = 900, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 20, 12, 40
# Radius of a point without time, and the radius that a share of 100 % adds.
_RADIUS, _SHARE_RADIUS = 4.0, 12.0
_MAX_POINTS = 200
_NAMED_POINTS = 4
_NAME_LENGTH = 28


@dataclass(frozen=True)
class PlacedTick:
    """Mark of an axis."""

    at: float
    text: str


@dataclass(frozen=True)
class PlacedRoof:
    """Line of a roof, with its name at the end of the slope."""

    name: str
    line: str  # points of the SVG polyline
    x: float
    y: float


@dataclass(frozen=True)
class PlacedPoint:
    """Circle of an operation."""

    x: float
    y: float
    radius: float
    kind: str  # class of the circle: ``whole``, ``compute``, ``memory`` or ``unknown``
    title: str
    label: str  # visible name, or ""


@dataclass(frozen=True)
class PlacedChart:
    """Roofline plot in the units of its SVG image."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    x_ticks: Sequence[PlacedTick]
    y_ticks: Sequence[PlacedTick]
    roofs: Sequence[PlacedRoof]
    points: Sequence[PlacedPoint]


def place_chart(report: RooflineReport) -> PlacedChart | None:
    """Return the plot of a report; None without a point."""
    chart = build_chart(report)
    if chart is None:
        return None

    def place_x(value: float) -> float:
        return round(_LEFT + get_share(value, chart.x_range) * (WIDTH - _LEFT - _RIGHT), 1)

    def place_y(value: float) -> float:
        return round(HEIGHT - _BOTTOM - get_share(value, chart.y_range) * (HEIGHT - _TOP - _BOTTOM), 1)

    roofs = [
        PlacedRoof(
            roof.name,
            " ".join(f"{place_x(x)},{place_y(y)}" for x, y in roof.line),
            place_x(roof.line[-1][0]),
            place_y(roof.line[-1][1]),
        )
        for roof in chart.roofs
    ]
    points = []
    for number, point in enumerate(chart.points[:_MAX_POINTS]):
        row = point.row
        is_whole = row.kind == "model"
        name = row.name if len(row.name) <= _NAME_LENGTH else f"{row.name[: _NAME_LENGTH - 1]}…"
        points.append(
            PlacedPoint(
                place_x(point.x),
                place_y(point.y),
                round(_RADIUS + _SHARE_RADIUS * math.sqrt(0.0 if is_whole else row.share), 1),
                "whole" if is_whole else row.bound or "unknown",
                f"{row.name}: {format_si(point.y, 'op/s')} at {point.x:.3g} op/byte, {format_attained(row)} attained",
                name if number < _NAMED_POINTS else "",
            )
        )
    return PlacedChart(
        WIDTH,
        HEIGHT,
        _LEFT,
        WIDTH - _RIGHT,
        _TOP,
        HEIGHT - _BOTTOM,
        [PlacedTick(place_x(value), f"{value:g}") for value in list_ticks(chart.x_range)],
        [PlacedTick(place_y(value), format_si(value, "op/s")) for value in list_ticks(chart.y_range)],
        roofs,
        points,
    )

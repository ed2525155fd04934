"""Histograms and scatter plot for a tensor's page."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hil.controller.analysis.tensors.overview import Bin, Overview
from hil.controller.analysis.tensors.pictures import draw_scatter_png
from hil.controller.web.templating import number

WIDTH, HEIGHT = 480, 140


@dataclass(frozen=True)
class Bar:
    """Rectangle in pixels, relative to the upper left corner."""

    x: float
    y: float
    width: float
    height: float
    series: int
    text: str


@dataclass(frozen=True)
class Histogram:
    """Histogram with logarithmic bar heights, so that one element among millions is visible."""

    bars: Sequence[Bar]
    bins: Sequence[Bin]
    ends: tuple[str, str]
    most: int  # largest count in a bar

    @property
    def filled(self) -> list[Bin]:
        """Bins with at least one element."""
        return [one for one in self.bins if any(one.counts)]


def make_histogram(bins: Sequence[Bin], names: Sequence[str]) -> Histogram | None:
    """Return a histogram for one or two tensors, or None if all bins are empty."""
    most = max((count for one in bins for count in one.counts), default=0)
    if not most:
        return None
    step = WIDTH / len(bins)
    bars = []
    for place, one in enumerate(bins):
        for series, count in enumerate(one.counts):
            if not count:
                continue
            height = HEIGHT * (1 + math.log10(count)) / (1 + math.log10(most))
            width = step / len(one.counts)
            text = f"{number(one.low)} to {number(one.high)}: {count}"
            text = f"{names[series]}, {text}" if len(one.counts) > 1 else text
            bars.append(
                Bar(place * step + series * width, HEIGHT - height, max(width - 0.5, 0.5), height, series, text)
            )
    return Histogram(bars, bins, (number(bins[0].low), number(bins[-1].high)), most)


def make_scatter_picture(found: Overview) -> str:
    """Return a data URL with a plot of board values (y) against reference values (x), or "" without data."""
    if found.scatter is None or not found.scatter.any():
        return ""
    return "data:image/png;base64," + base64.b64encode(draw_scatter_png(found.scatter)).decode()

"""Find level shifts in a series of measurements. Pure functions of numbers in time order.

A series is cut at the point with the largest difference of means, measured in standard errors. This is the CUSUM
statistic of a single step (Hinkley, "Inference about the change-point in a sequence of random variables", 1970). If the
statistic exceeds :func:`compute_threshold`, the cut is a step, and both sides of the cut are searched in turn. This is
binary segmentation (Scott and Knott, "A cluster analysis method for grouping means in the analysis of variance", 1974).

- The noise is estimated from the moving range: the median difference of neighbours, as in an individuals chart
  (Shewhart, "Economic control of quality of manufactured product", 1931; the factor for medians is Wheeler's). Steps do
  not affect the estimate. A level's band is three standard deviations to each side.
- A single outlier is not a step. Before the search, every value is clipped to three standard deviations around the
  median of its neighbourhood. So a step can be found after three measurements.
- An outlier near a step does not move the step. A step is placed where the sum of the distances from the medians of
  both sides is smallest (least absolute deviations). A value beyond both medians by more than three standard deviations
  counts as three standard deviations, and belongs to the earlier level.
- Steps smaller than ``least`` are not reported, even if they are clear.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# With fewer measurements, the noise cannot be estimated and no steps are reported.
MIN_SAMPLES = 8
_SIDE = 3  # minimum measurements on each side of a step
_NEIGHBOURHOOD = 5
_BAND_SIGMAS = 3.0
# Median absolute neighbour difference divided by the standard deviation, for a normal distribution.
_RANGE_BY_SIGMA = 0.954


@dataclass(frozen=True)
class Level:
    """A part of a series without steps."""

    start: int
    end: int  # exclusive
    median: float
    # low, high: the noise band around the median.
    low: float
    high: float


def estimate_noise(values: Floats) -> float:
    """Return the measurements' standard deviation about their level, unaffected by steps; 0 for fewer than two."""
    return float(np.median(np.abs(np.diff(values)))) / _RANGE_BY_SIGMA if values.size > 1 else 0.0


def compute_threshold(count: int) -> float:
    """Return the threshold of the statistic above which a cut in a series of ``count`` measurements is a step.

    Fewer than 1 % of series with normal noise have a false step, at any length. The formula was found by
    simulation, which the tests repeat. Short series need a higher threshold, because their noise is less certain.
    """
    return 4.4 + 10.0 / count


def find_steps(values: Sequence[float] | Floats, *, least: float) -> list[int]:
    """Return new levels' start indices, in order; ignore level differences smaller than ``least``."""
    series = np.asarray(values, np.float64)
    if series.size < MIN_SAMPLES or not np.isfinite(series).all():
        return []
    # Use a minimum for the noise, because a constant series is free from noise. Steps below ``least`` are not reported
    # anyway.
    sigma = max(estimate_noise(series), least / 10)
    drawn = _clip_outliers(series, sigma)
    return _drop_small_cuts(series, _align_cuts(series, sorted(_find_cuts(drawn, sigma)), sigma), least)


def find_levels(values: Sequence[float] | Floats, steps: Sequence[int]) -> list[Level]:
    """Return the levels between steps; all bands use the whole series' noise."""
    series = np.asarray(values, np.float64)
    if not series.size:
        return []
    half = _BAND_SIGMAS * estimate_noise(series)
    edges = [0, *steps, series.size]
    medians = [float(np.median(series[start:end])) for start, end in itertools.pairwise(edges)]
    return [
        Level(start, end, median, median - half, median + half)
        for start, end, median in zip(edges, edges[1:], medians, strict=False)
    ]


def _align_cuts(series: Floats, cuts: list[int], sigma: float) -> list[int]:
    """Move every cut to the level change between the neighbouring cuts."""
    edges = [0, *cuts, series.size]
    # Repeat, because moving a cut changes the medians next to the following cut.
    for place in [*range(1, len(edges) - 1)] * 2:
        start, end = edges[place - 1], edges[place + 1]
        edges[place] = start + _find_best_cut(series[start:end], edges[place] - start, _BAND_SIGMAS * sigma)
    return edges[1:-1]


def _find_best_cut(piece: Floats, cut: int, most: float) -> int:
    """Return the cut with the smallest total distance from both medians; the last in a tie.

    Values beyond both medians have a distance of at most ``most``. Values between belong to the nearer median.
    """
    before, after = (piece - np.median(side) for side in (piece[:cut], piece[cut:]))
    between = before * after < 0
    bounds = np.where(between, max(most, abs(float(before[0] - after[0])) / 2), most)
    sums = np.cumsum(np.minimum(np.abs(before), bounds) - np.minimum(np.abs(after), bounds))[:-1]
    return int(sums.size - sums[::-1].argmin())


def _drop_small_cuts(series: Floats, cuts: list[int], least: float) -> list[int]:
    """Remove cuts between levels that differ by less than ``least``, the smallest first.

    Cuts next to a level with fewer than :data:`_SIDE` measurements are removed first.
    """
    while cuts:
        edges = [0, *cuts, series.size]
        medians = [float(np.median(series[start:end])) for start, end in itertools.pairwise(edges)]
        apart = [abs(now - was) for was, now in itertools.pairwise(medians)]
        long = [min(now - was, then - now) >= _SIDE for was, now, then in zip(edges, cuts, edges[2:], strict=False)]
        smallest = min(range(len(cuts)), key=lambda place: (long[place], apart[place]))
        if long[smallest] and (apart[smallest] >= least or math.isclose(apart[smallest], least)):
            break
        del cuts[smallest]
    return cuts


def _clip_outliers(series: Floats, sigma: float) -> Floats:
    """Clip every value to three standard deviations around the neighbourhood's median."""
    reach = _NEIGHBOURHOOD // 2
    # At the ends, the neighbourhood is the first or the last five values.
    windows = np.lib.stride_tricks.sliding_window_view(series, _NEIGHBOURHOOD)
    inner = np.median(windows, axis=1)
    centres = np.concatenate((np.full(reach, inner[0]), inner, np.full(reach, inner[-1])))
    drawn: Floats = np.clip(series, centres - _BAND_SIGMAS * sigma, centres + _BAND_SIGMAS * sigma)
    return drawn


def _find_cuts(drawn: Floats, sigma: float) -> Iterator[int]:
    pieces = [(0, drawn.size)]
    while pieces:
        start, end = pieces.pop()
        count = end - start
        if count < 2 * _SIDE:
            continue
        sums = np.cumsum(drawn[start:end])
        left = np.arange(_SIDE, count - _SIDE + 1, dtype=np.float64)
        before = sums[_SIDE - 1 : count - _SIDE]
        difference = (sums[-1] - before) / (count - left) - before / left
        scores = np.abs(difference) / (sigma * np.sqrt(1 / left + 1 / (count - left)))
        best = int(scores.argmax())
        cut = start + _SIDE + best
        if scores[best] < compute_threshold(drawn.size):
            continue
        yield cut
        pieces += [(start, cut), (cut, end)]

"""Find where a series of measurements steps to another level: pure functions of numbers in the order of time.

A series is cut in two where the difference of the means of its sides is the least likely, in standard errors: the
CUSUM statistic of a single step (Hinkley, "Inference about the change-point in a sequence of random variables", 1970).
Where it exceeds :func:`threshold`, the cut is a step and both sides are searched in turn (binary segmentation: Scott
and Knott, "A cluster analysis method for grouping means in the analysis of variance", 1974).

- The noise is told by the moving range, the median difference of neighbours, as an individuals chart does (Shewhart,
  "Economic control of quality of manufactured product", 1931; the factor for medians is Wheeler's): steps do not widen
  it. A level's band is three standard deviations to each side.
- One wild measurement is no step: before the search each value is drawn to three standard deviations around the median
  of its neighbourhood. So a step shows when three measurements follow it.
- A wild measurement near a step does not move it: once the steps are known, each is put where the distances from the
  medians of both sides are the smallest in sum (least absolute deviations). What lies beyond both by more than three
  standard deviations counts as three, and belongs to the level before.
- A smaller step than ``least`` is not told, however clear it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Below so many measurements nothing is told: what their noise is would be a guess.
LEAST_SAMPLES = 8
_SIDE = 3  # a step has so many measurements on each side
_NEIGHBOURHOOD = 5
_BAND_SIGMAS = 3.0
# The median absolute difference of neighbours by a normal distribution's standard deviation.
_RANGE_BY_SIGMA = 0.954


@dataclass(frozen=True)
class Level:
    """A stretch of a series without a step."""

    start: int
    end: int  # the index after its last
    median: float
    # low, high: the band in which noise leaves a measurement.
    low: float
    high: float


def noise_of(values: Floats) -> float:
    """The standard deviation of measurements about their level, whatever steps there are; 0 for fewer than two."""
    return float(np.median(np.abs(np.diff(values)))) / _RANGE_BY_SIGMA if values.size > 1 else 0.0


def threshold(count: int) -> float:
    """The statistic from which a cut of so many measurements is a step.

    Of series of normal noise, whatever their length, fewer than one in a hundred has a step that is none; found by
    simulation, which the tests repeat. Short series need more, since their noise is known less well.
    """
    return 4.4 + 10.0 / count


def find_steps(values: Sequence[float] | Floats, *, least: float) -> list[int]:
    """The indices at which a new level begins, in order; smaller differences of levels than ``least`` are not told."""
    series = np.asarray(values, np.float64)
    if series.size < LEAST_SAMPLES or not np.isfinite(series).all():
        return []
    # What does not vary at all has no noise; a step of less than ``least`` is not told anyway.
    sigma = max(noise_of(series), least / 10)
    drawn = _drawn(series, sigma)
    return _large(series, _placed(series, sorted(_cuts(drawn, sigma)), sigma), least)


def levels(values: Sequence[float] | Floats, steps: Sequence[int]) -> list[Level]:
    """The levels between steps, each with the band of the whole series' noise."""
    series = np.asarray(values, np.float64)
    if not series.size:
        return []
    half = _BAND_SIGMAS * noise_of(series)
    edges = [0, *steps, series.size]
    medians = [float(np.median(series[start:end])) for start, end in itertools.pairwise(edges)]
    return [
        Level(start, end, median, median - half, median + half)
        for start, end, median in zip(edges, edges[1:], medians, strict=False)
    ]


def _placed(series: Floats, cuts: list[int], sigma: float) -> list[int]:
    """The cuts, each where the level changes, between its neighbours."""
    edges = [0, *cuts, series.size]
    # What moves a cut changes the medians beside the next.
    for place in [*range(1, len(edges) - 1)] * 2:
        start, end = edges[place - 1], edges[place + 1]
        edges[place] = start + _best_cut(series[start:end], edges[place] - start, _BAND_SIGMAS * sigma)
    return edges[1:-1]


def _best_cut(piece: Floats, cut: int, most: float) -> int:
    """Where two levels meet: the last place with the least sum of distances from the medians.

    Beyond both medians a distance is at most ``most``; what lies between them is of the nearer one.
    """
    before, after = (piece - np.median(side) for side in (piece[:cut], piece[cut:]))
    between = before * after < 0
    bounds = np.where(between, max(most, abs(float(before[0] - after[0])) / 2), most)
    sums = np.cumsum(np.minimum(np.abs(before), bounds) - np.minimum(np.abs(after), bounds))[:-1]
    return int(sums.size - sums[::-1].argmin())


def _large(series: Floats, cuts: list[int], least: float) -> list[int]:
    """The cuts without those between levels that differ by less than ``least``, the smallest taken out first.

    Before these, cuts beside a level of too few measurements.
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


def _drawn(series: Floats, sigma: float) -> Floats:
    """Each value within three standard deviations of the median of its neighbourhood."""
    reach = _NEIGHBOURHOOD // 2
    # At the ends the neighbourhood is the first or the last five.
    windows = np.lib.stride_tricks.sliding_window_view(series, _NEIGHBOURHOOD)
    inner = np.median(windows, axis=1)
    centres = np.concatenate((np.full(reach, inner[0]), inner, np.full(reach, inner[-1])))
    drawn: Floats = np.clip(series, centres - _BAND_SIGMAS * sigma, centres + _BAND_SIGMAS * sigma)
    return drawn


def _cuts(drawn: Floats, sigma: float) -> Iterator[int]:
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
        if scores[best] < threshold(drawn.size):
            continue
        yield cut
        pieces += [(start, cut), (cut, end)]

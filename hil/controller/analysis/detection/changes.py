"""Find changes of level in a series of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from statistics import NormalDist

import numpy as np

from hil.controller.devices.measuring.time_statistics import Floats

# Minimum runs in a segment.
MIN_SEGMENT = 3
# Probability of finding a change in a series without changes.
CHANGE_P = 0.001
# Maximum runs to search. Older runs give little information about the current level, and cost time.
_MAX_LENGTH = 256
_PERMUTATIONS = 2000
# Length of the windows that are also searched. A temporary slow period hardly changes the sums over a long series.
_WINDOW = 50
_NORMAL = NormalDist()
_MAX_CORRELATION = 0.9


@dataclass(frozen=True)
class Change:
    """A change of level."""

    index: int  # index of the first value with the new level
    # Median after the change divided by the median before, up to the neighbouring changes; None unless all are above 0.
    ratio: float | None
    p_value: float  # probability of such a change in a series without changes
    # before, after: the two medians
    before: float = 0.0
    after: float = 0.0


def find_changes(values: Sequence[float], *, p_value: float = CHANGE_P) -> list[Change]:
    """Find the changes of level in finite values, in time order.

    The test is a cumulative sum of normal scores (van der Waerden). Scores depend only on ranks. So outliers have
    little effect, and all series of the same length have the same permutation distribution (Pettitt, "A non-parametric
    approach to the change-point problem", 1979, uses ranks). The largest change splits the series, and then each part
    is searched (binary segmentation, Scott and Knott, 1974). E-divisive (Matteson and James, 2014) splits in the same
    way, with a statistic that also depends on the spread. Autocorrelation makes a change less significant.

    Only the newest 256 values are searched.
    """
    first = max(len(values) - _MAX_LENGTH, 0)
    series = np.asarray(values[first:], np.float64)
    splits = sorted(_split(series, 0, series.size, p_value))
    edges = [0, *(index for index, _ in splits), series.size]
    changes = []
    for number, (index, found) in enumerate(splits, 1):
        parts = series[edges[number - 1] : index], series[index : edges[number + 1]]
        before, after = (float(np.median(part)) for part in parts)
        changes.append(Change(first + index, _compute_ratio(*parts), found, before, after))
    return changes


def _compute_ratio(before: Floats, after: Floats) -> float | None:
    """Return the ratio of the medians of the logarithms; None if a value is not above 0, such as a score."""
    if before.min() <= 0 or after.min() <= 0:
        return None
    return math.exp(float(np.median(np.log(after)) - np.median(np.log(before))))


def _split(series: Floats, start: int, stop: int, p_value: float) -> list[tuple[int, float]]:
    if stop - start < 2 * MIN_SEGMENT:
        return []
    index, found = _find_largest(series, start, stop)
    if found > p_value and stop - start > _WINDOW:
        windows = range(start, stop - _WINDOW // 2, _WINDOW // 2)
        index, found = min((_find_largest(series, at, min(at + _WINDOW, stop)) for at in windows), key=itemgetter(1))
    if found > p_value:
        return []
    return [(index, found), *_split(series, start, index, p_value), *_split(series, index, stop, p_value)]


def _find_largest(series: Floats, start: int, stop: int) -> tuple[int, float]:
    """Return the index of the most significant change in a range, and the probability without a change."""
    scores = _compute_scores(series[start:stop])
    sizes = _compute_statistics(scores[None, :])[0]
    at = int(sizes.argmax())
    place = at + MIN_SEGMENT
    size = float(sizes[at]) / _compute_inflation(scores, place)
    null = _permute_scores(scores.size)
    larger = null.size - int(np.searchsorted(null, size - 1e-9))
    return start + place, (1 + larger) / (1 + null.size)


def _compute_scores(values: Floats) -> Floats:
    """Return normal scores with variance 1. Equal values get their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    quantiles = _compute_quantiles(values.size)
    scores = np.interp(ranks, np.arange(1, values.size + 1), quantiles)
    spread = float(scores.std())
    return scores / spread if spread > 0 else scores


@lru_cache(maxsize=512)
def _compute_quantiles(count: int) -> Floats:
    return np.array([_NORMAL.inv_cdf(rank / (count + 1)) for rank in range(1, count + 1)])


def _compute_statistics(scores: Floats) -> Floats:
    """Return the absolute standardized difference of level for every split of [series, n] scores."""
    count = scores.shape[1]
    before = np.arange(MIN_SEGMENT, count - MIN_SEGMENT + 1)
    sums = np.cumsum(scores, axis=1)
    middle = sums[:, -1:] * before / count
    statistics: Floats = np.abs(sums[:, before - 1] - middle) / np.sqrt(before * (count - before) / count)
    return statistics


def _compute_inflation(scores: Floats, place: int) -> float:
    """Return the factor by which autocorrelation increases the statistic's standard deviation, at least 1."""
    parts = scores[:place], scores[place:]
    rest = np.concatenate([part - part.mean() for part in parts])
    power = float((rest**2).sum())
    lag = float((rest[1:] * rest[:-1]).sum()) / power if power > 0 else 0.0
    if lag < 1.645 / math.sqrt(scores.size):
        return 1.0
    lag = min(lag, _MAX_CORRELATION)
    return math.sqrt((1 + lag) / (1 - lag))


@lru_cache(maxsize=512)
def _permute_scores(count: int) -> Floats:
    """Return the largest statistics of many random permutations of the scores, sorted. The seed is fixed."""
    rng = np.random.default_rng(count)
    quantiles = _compute_quantiles(count)
    scores = quantiles / quantiles.std()
    found = []
    for _ in range(8):  # in parts, to limit memory
        orders = rng.permuted(np.broadcast_to(scores, (_PERMUTATIONS // 8, count)), axis=1)
        found.append(_compute_statistics(orders).max(axis=1))
    return np.sort(np.concatenate(found))

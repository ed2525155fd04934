"""Statistics of two scores of the same samples: tests and intervals for the difference."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np

from hil.controller.analysis.evaluation.metrics import Scorer

LEVEL = 0.95
_RESAMPLES = 1000
_HALVINGS = 60


def compute_mcnemar_p_value(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value of McNemar's test (McNemar 1947, with the binomial distribution).

    Args:
        only_first: number of samples that only the first program predicts correctly.
        only_second: number of samples that only the second program predicts correctly.
    """
    total, fewer = only_first + only_second, min(only_first, only_second)
    if total == 0:
        return 1.0
    # Use logarithms, because 2**total overflows a float.
    logs = [_log_choose(total, count) - total * math.log(2) for count in range(fewer + 1)]
    return min(1.0, 2 * sum(map(math.exp, logs)))


def _log_choose(total: int, count: int) -> float:
    return math.lgamma(total + 1) - math.lgamma(count + 1) - math.lgamma(total - count + 1)


def compute_tango_interval(
    only_first: int, only_second: int, samples: int, level: float = LEVEL
) -> tuple[float, float]:
    """Return the score interval for the difference of two paired shares (Tango 1998, Statistics in Medicine 17).

    The difference is (``only_first`` - ``only_second``) / ``samples``. Without discordant samples, the interval still
    has a width above 0.

    Args:
        samples: number of all samples, at least 1.
        level: probability that the interval contains the true difference.
    """
    limit = NormalDist().inv_cdf((1 + level) / 2)
    difference = (only_first - only_second) / samples

    def exceeds(at: float) -> bool:
        return abs(_compute_tango_statistic(only_first, only_second, samples, at)) > limit

    return _find_edge(exceeds, difference, -1.0), _find_edge(exceeds, difference, 1.0)


def _find_edge(exceeds: Callable[[float], bool], inside: float, outside: float) -> float:
    if not exceeds(outside):
        return outside
    for _ in range(_HALVINGS):
        middle = (inside + outside) / 2
        inside, outside = (inside, middle) if exceeds(middle) else (middle, outside)
    return (inside + outside) / 2


def _compute_tango_statistic(only_first: int, only_second: int, samples: int, difference: float) -> float:
    """Return the standardised distance of the observed difference from ``difference``.

    The variance uses the maximum likelihood estimate for the share of ``only_second``, given this difference.
    """
    linear = -only_first - only_second + (2 * samples - only_first + only_second) * difference
    constant = -only_second * difference * (1 - difference)
    root = math.sqrt(max(linear**2 - 8 * samples * constant, 0.0))
    share = (root - linear) / (4 * samples)
    variance = samples * (2 * share + difference * (1 - difference))
    distance = only_first - only_second - samples * difference
    if variance <= 0:
        return math.copysign(math.inf, distance) if abs(distance) > 1e-9 else 0.0
    return distance / math.sqrt(variance)


def compute_bootstrap_interval(
    first: Scorer, second: Scorer, samples: int, *, seed: int, level: float = LEVEL
) -> tuple[float, float] | None:
    """Return the percentile interval of the paired bootstrap for a difference of scores (Efron and Tibshirani 1993).

    A resample draws the same samples for both scores.

    Args:
        first, second: functions that score weighted samples; the difference is first - second.
        samples: number of samples. With fewer than two samples, there is no interval.
        seed: seed of the resamples.

    Returns:
        The interval, or None if it cannot be computed, for example because a score is not a number.
    """
    if samples < 2:
        return None
    random = np.random.default_rng(seed)
    found = np.empty(_RESAMPLES)
    with np.errstate(all="ignore"):
        for number in range(_RESAMPLES):
            weights = np.bincount(random.integers(0, samples, samples), minlength=samples).astype(np.float64)
            found[number] = first(weights) - second(weights)
    if not np.isfinite(found).all():
        return None
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)

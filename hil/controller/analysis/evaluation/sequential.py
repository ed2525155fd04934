"""Sequential test for the mean of a finite dataset, valid at any time.

The samples are drawn in random order without replacement. The test bets against a hypothetical mean, and the wealth
from the bets is the evidence. If the mean is true, the wealth is a martingale. The probability that the wealth ever
exceeds 1/error is then at most ``error`` (Ville 1939). See Waudby-Smith and Ramdas, "Estimating means of bounded random
variables by betting" (JRSS B 86, 2024), section 5.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
# Probability of a wrong decision before all samples have run.
ERROR = 0.01
# Stakes as shares of the largest possible stake. The wealth is averaged over the stakes, so that no stake must be
# chosen in advance.
_STAKES = np.array([0.02, 0.05, 0.14, 0.38, 0.98])
_HALVINGS = 40
_EPSILON = 1e-12


def measure_evidence(values: Values, total: int, mean: float) -> Values:
    """Return the logarithm of the evidence against "the dataset's mean is at most ``mean``" after every sample.

    Args:
        values: values of the drawn samples in order, from 0 to 1.
        total: number of samples in the dataset.
        mean: the mean to refute.
    """
    drawn = np.concatenate([[0.0], np.cumsum(values)[:-1]])
    expected = (total * mean - drawn) / (total - np.arange(len(values)))
    stakes = _STAKES[:, None] / np.maximum(expected, _EPSILON)
    wealth = np.cumsum(np.log1p(np.maximum(stakes * (values - expected), _EPSILON - 1)), axis=1)
    most = wealth.max(axis=0)
    log_mean = most + np.log(np.exp(wealth - most).mean(axis=0))
    # The sum of the drawn values already exceeds the total that the mean implies.
    is_refuted = np.cumsum(values) > total * mean + _EPSILON * total
    return np.where(is_refuted, math.inf, log_mean)


def decide_mean(values: Values, total: int, mean: float, error: float = ERROR) -> Literal["above", "below", ""]:
    """Return "above" if the dataset's mean is at least ``mean``, "below" if it is less, and "" if undecided.

    A decision before the last sample is wrong with a probability of at most ``error``. After the last sample, it is
    exact.

    Args:
        values: values of the drawn samples in order, from 0 to 1.
        total: number of samples in the dataset.
    """
    if len(values) == total:
        return "above" if values.mean() >= mean - _EPSILON else "below"
    if not len(values):
        return ""
    limit = -math.log(error)
    if measure_evidence(values, total, mean).max() >= limit:
        return "above"
    return "below" if measure_evidence(1 - values, total, 1 - mean).max() >= limit else ""


def bound_mean(values: Values, total: int, level: float = 0.95) -> tuple[float, float]:
    """Return a confidence interval for the dataset's mean that is valid for any stopping rule.

    Args:
        values, total: see :func:`decide_mean`; at least one value.
        level: probability that the interval contains the mean.
    """
    limit = -math.log((1 - level) / 2)
    low = _find_bound(values, total, limit)
    return low, 1 - _find_bound(1 - values, total, limit)


def _find_bound(values: Values, total: int, limit: float) -> float:
    """Return the largest refuted mean. The evidence is stronger against smaller means."""
    refuted, kept = float(values.sum()) / total, float(values.mean())
    if len(values) == total:
        return kept
    for _ in range(_HALVINGS):
        middle = (refuted + kept) / 2
        if measure_evidence(values, total, middle).max() >= limit:
            refuted = middle
        else:
            kept = middle
    return refuted

"""Confidence interval of a median from order statistics, for pages with hundreds of series."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from hil.controller.devices.measuring.time_statistics import LEVEL, Floats
from hil.controller.records.base import Interval

_MAX_CORRELATION = 0.9


def rank_interval(samples: Floats, *, level: float = LEVEL) -> Interval | None:
    """Return the median's confidence interval for [n] samples in time order; None with too few samples.

    The limits are the order statistics of the sign test (Conover, "Practical Nonparametric Statistics", 1999). Serial
    correlation reduces the number of samples: n (1 - r) / (1 + r), with the lag-1 correlation r of the signs. The
    interval is similar to :func:`hil.controller.devices.measuring.time_statistics.compute_median_interval`, and needs
    no resampling.
    """
    count = samples.size
    if not count:
        return None
    signs = np.sign(samples - np.median(samples))
    power = float((signs**2).sum())
    lag = float((signs[1:] * signs[:-1]).sum()) / power if power else 0.0
    lag = min(max(lag, 0.0), _MAX_CORRELATION)
    effective = count * (1 - lag) / (1 + lag)
    half = NormalDist().inv_cdf((1 + level) / 2) * count / (2 * math.sqrt(effective))
    low, high = math.floor(count / 2 - half), math.ceil(count / 2 + half) + 1  # ranks, from 1
    if low < 1 or high > count:
        return None
    ordered = np.sort(samples)
    return Interval(low=float(ordered[low - 1]), high=float(ordered[high - 1]), level=level)

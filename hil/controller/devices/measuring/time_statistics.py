"""Statistics of iteration times: pure functions of samples with fixed seeds, so results are reproducible.

Consecutive samples are correlated (caches, clock scaling, other load on the machine), so they are never treated as
independent. The interval of a median is from a block bootstrap, which draws blocks of neighbouring samples (Carlstein,
"The use of subseries values for estimating the variance of a general statistic from a stationary sequence", 1986). With
few blocks, a plain bootstrap interval is too narrow. It is widened as in Hesterberg, "What teachers should know about
the bootstrap", 2015 (expanded percentile interval).
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hil.controller.records.base import Interval
from hil.controller.records.measurements.bench import BenchTimes, Drift

Nanoseconds: TypeAlias = "npt.NDArray[np.int64]"
Floats = npt.NDArray[np.float64]

# Smaller differences are not reported: a rebuilt program or a different memory layout may cause them.
DEFAULT_EFFECT = 0.03
LEVEL = 0.99
# With fewer blocks or rounds, an interval would be a guess.
MIN_REPEATS = 6
_RESAMPLES = 2000
_MAX_BLOCKS = 100
_MAX_BINS = 512
_MAX_GROUPS = 64
_DRIFT_P = 0.01
_NORMAL = NormalDist()
# Standard deviation divided by median absolute deviation, for a normal distribution.
_SIGMA_BY_MAD = 1.4826
_OUTLIER_SIGMAS = 5.0
# Coarse clocks can give a zero spread: an outlier must exceed the median by at least this share.
_OUTLIER_SHARE = 0.05


def summarise(starts: Nanoseconds, durations: Nanoseconds, *, drift_share: float) -> BenchTimes:
    """Summarise a side's iterations. Mark a drift that exceeds ``drift_share``, relative to the median."""
    p10, p50, p90, p99 = (float(value) for value in np.percentile(durations, (10, 50, 90, 99)))
    spread = _SIGMA_BY_MAD * float(np.median(np.abs(durations - p50)))
    above = p50 + max(_OUTLIER_SIGMAS * spread, _OUTLIER_SHARE * p50)
    return BenchTimes(
        iterations=int(durations.size),
        p10_ns=p10,
        p50_ns=p50,
        p90_ns=p90,
        p99_ns=p99,
        min_ns=float(durations.min()),
        max_ns=float(durations.max()),
        mean_ns=float(durations.mean()),
        stdev_ns=float(durations.std(ddof=1)) if durations.size > 1 else 0.0,
        median=compute_median_interval(durations),
        drift=measure_drift(starts, durations, share=drift_share),
        outliers=int((durations > above).sum()),
        outlier_above_ns=above,
    )


def compute_median_interval(durations: Nanoseconds, *, level: float = LEVEL, seed: int = 0) -> Interval | None:
    """Return the median's confidence interval for [n] samples in time order; None with too few samples."""
    # Block length is about the cube root of n (Hall, Horowitz and Jing, 1995), or longer to limit the block count.
    blocks = min(durations.size // math.ceil(max(durations.size, 1) ** (1 / 3)), _MAX_BLOCKS)
    if blocks < MIN_REPEATS:
        return None
    # Find a resample's median by counting samples per block and value bin. Up to _MAX_BINS samples, each value has a
    # separate bin, so that no value is rounded.
    shares = np.linspace(0.0, 1.0, min(durations.size, _MAX_BINS))
    edges = np.unique(np.quantile(durations, shares, method="higher"))
    bins = np.searchsorted(edges, durations)
    block_of = np.arange(durations.size) * blocks // durations.size
    counts = np.bincount(block_of * edges.size + bins, minlength=blocks * edges.size).reshape(blocks, edges.size)
    weights = np.random.default_rng(seed).multinomial(blocks, np.full(blocks, 1 / blocks), size=_RESAMPLES)
    below = np.cumsum(weights.astype(np.float64) @ counts.astype(np.float64), axis=1)
    # The median of an even number of samples is the mean of the two middle ones.
    lower = edges[(2 * below >= below[:, -1:]).argmax(axis=1)].astype(np.float64)
    upper = edges[(2 * below > below[:, -1:]).argmax(axis=1)]
    return bootstrap_interval((lower + upper) / 2, blocks, level)


def measure_drift(starts: Nanoseconds, durations: Nanoseconds, *, share: float) -> Drift | None:
    """Find a trend over the run; None with too few samples.

    The size is the Theil-Sen slope over group medians. The significance is from the Mann-Kendall test, with the
    variance from Hamed and Rao for autocorrelated data ("A modified Mann-Kendall trend test", 1998).
    """
    groups = min(_MAX_GROUPS, durations.size)
    if groups < 2 * MIN_REPEATS:
        return None
    pieces = np.array_split(np.arange(durations.size), groups)
    times = np.array([float(np.mean(starts[piece] - starts[0])) for piece in pieces])
    values = np.array([float(np.median(durations[piece])) for piece in pieces])
    first, second = np.triu_indices(groups, 1)
    apart = times[second] - times[first]
    slope = float(np.median((values[second] - values[first]) / np.where(apart > 0, apart, np.inf)))
    change = slope * float(times[-1] - times[0]) / max(float(np.median(values)), 1.0)
    rises = float(np.sign(values[second] - values[first]).sum())
    variance = _compute_trend_variance(values, slope * times)
    score = (abs(rises) - 1) / math.sqrt(variance) if variance > 0 and rises else 0.0
    p_value = min(2 * _NORMAL.cdf(-max(score, 0.0)), 1.0)
    return Drift(change=change, p_value=p_value, marked=p_value < _DRIFT_P and abs(change) > share)


def _compute_trend_variance(values: Floats, trend: Floats) -> float:
    """Return the variance of Kendall's sum without a trend, for autocorrelated values."""
    n = values.size
    ties = np.unique(values, return_counts=True)[1].astype(np.float64)
    plain = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    ranks = np.argsort(np.argsort(values - trend)).astype(np.float64)
    ranks -= ranks.mean()
    lags = np.arange(1, n - 2)
    power = float((ranks**2).sum()) or 1.0
    alike = np.array([float((ranks[lag:] * ranks[:-lag]).sum()) for lag in lags]) / power
    alike[np.abs(alike) < _NORMAL.inv_cdf(0.975) / math.sqrt(n)] = 0.0
    more = 1 + 2 / (n * (n - 1) * (n - 2)) * float(((n - lags) * (n - lags - 1) * (n - lags - 2) * alike).sum())
    return plain * max(more, 1.0)  # alternating samples would reduce the variance: do not rely on that


def bootstrap_interval(resampled: Floats, repeats: int, level: float) -> Interval:
    """Return the expanded percentile interval: as wide as a t interval with ``repeats`` repetitions."""
    wide = math.sqrt(repeats / (repeats - 1)) * compute_student_quantile((1 + level) / 2, repeats - 1)
    tail = _NORMAL.cdf(-wide)
    low, high = np.quantile(resampled, (tail, 1 - tail))
    return Interval(low=float(low), high=float(high), level=level)


def compute_student_quantile(share: float, freedom: Any) -> Any:
    """Return a quantile from Student's t distribution, by Abramowitz and Stegun's expansion 26.7.5.

    ``freedom`` is a number or an array. From 5 degrees of freedom on, the error is below 1 % at the 99.5 % quantile.
    """
    z = _NORMAL.inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))

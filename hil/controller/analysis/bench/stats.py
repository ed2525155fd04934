"""Statistics of iteration times: pure functions of samples, seeded, so the same samples give the same numbers.

Samples that follow one another are alike (caches, clocks that are raised and lowered, whatever else the machine does),
so nothing here takes them for independent:

- A median's interval is from a block bootstrap: blocks of neighbouring samples are drawn, not samples (Carlstein, "The
  use of subseries values for estimating the variance of a general statistic from a stationary sequence", 1986).
- A ratio's interval is from a bootstrap over rounds. Each round loads both programs anew, for where a process happens
  to lie in memory alone can shift its time by percents (Mytkowicz et al., "Producing wrong data without doing anything
  obviously wrong!", 2009); so rounds, not samples, are what repeats (Kalibera and Jones, "Rigorous benchmarking in
  reasonable time", 2013). A round's value is the difference of mean logarithms over A B B A, which cancels a drift.
- What is compared is a batch's undisturbed time, its fifth percentile: what else a machine does only makes iterations
  longer, and moves a median by more than the differences that are looked for (Chen and Revels, "Robust benchmarking in
  noisy environments", 2016, take the minimum; the percentile does not hang on one lucky iteration).
- Few blocks or rounds make a plain bootstrap interval too short: it is widened as Hesterberg says ("What teachers
  should know about the bootstrap", 2015, the expanded percentile interval).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hil.controller.pipeline.options import Job

Nanoseconds: TypeAlias = "npt.NDArray[np.int64]"

# A difference below this is not told as one: it is what a rebuilt program or another memory layout may cost anyway.
DEFAULT_EFFECT = 0.03
DEFAULT_MIN_TIME_S = 2.0


@dataclass(frozen=True)
class BenchJob:
    """What `hil bench` was asked to do."""

    job: Job  # what it shares with `hil run`: models, board, inputs, tolerances. One model, or A and B to compare.
    iterations: int | None = None
    min_time_s: float = DEFAULT_MIN_TIME_S  # how long each side is to compute, in seconds
    warmup: int | None = None
    concurrency: int = 1
    against: str = ""  # a stored bench run, measured again as side A
    check: bool = True
    min_effect: float = DEFAULT_EFFECT  # the smallest share that is called a difference
    fail_if_slower: float | None = None  # share by which B may be slower than A; None allows any
    benchmark_out: Path | None = None


@dataclass(frozen=True)
class Batch:
    """Iterations of one side, measured in one go."""

    side: str
    round: int  # which loading of the program, from 0: both sides are loaded anew for each round
    copy: int
    start_ns: Nanoseconds  # of each iteration, int64 [n], by the clock that the run names
    duration_ns: Nanoseconds


@dataclass(frozen=True)
class Interval:
    """A confidence interval; ``level`` is the share of cases in which it holds the true value."""

    low: float
    high: float
    level: float


@dataclass(frozen=True)
class Drift:
    """Whether iterations became slower or faster while they were measured."""

    change: float  # from the first to the last, as a share of the median, by the robust slope; 0.02 is 2 % slower
    p_value: float  # how likely so clear a trend is where there is none
    marked: bool  # whether it is both clear and large enough to be told


@dataclass(frozen=True)
class Summary:
    """Statistics of one side's iterations, in nanoseconds."""

    iterations: int
    p10_ns: float
    p50_ns: float
    p90_ns: float
    p99_ns: float
    min_ns: float
    max_ns: float
    mean_ns: float
    stdev_ns: float
    median: Interval | None  # its confidence interval, None where there are too few iterations
    drift: Drift | None  # None where there are too few iterations
    outliers: int  # how many iterations took longer than ``outlier_above_ns``
    outlier_above_ns: float


@dataclass(frozen=True)
class Comparison:
    """B beside A, measured in turns on rounds of newly loaded programs."""

    ratio: float  # B's undisturbed time by A's (:mod:`hil.controller.analysis.bench.stats`): above 1 is slower
    interval: Interval
    rounds: int
    min_effect: float
    verdict: str  # ``no difference``, ``faster`` or ``slower``: what B is beside A


Floats = npt.NDArray[np.float64]

LEVEL = 0.99
# Below this many blocks or rounds no interval is told: it would be a guess.
LEAST_REPEATS = 6
_UNDISTURBED = 0.05
_RESAMPLES = 2000
_BLOCKS_MOST = 100
_BINS_MOST = 512
_GROUPS_MOST = 64
_DRIFT_P = 0.01
_NORMAL = NormalDist()
# The largest power of e that a float holds, about.
_LOG_MOST = 709.0
# A normal distribution's standard deviation by its median absolute deviation.
_SIGMA_BY_MAD = 1.4826
_OUTLIER_SIGMAS = 5.0
# Clocks that tick coarsely make a spread of nothing: what is not this much above the median is no outlier.
_OUTLIER_SHARE = 0.05


def summarise(starts: Nanoseconds, durations: Nanoseconds, *, drift_share: float) -> Summary:
    """What there is to say of one side's iterations; a drift is marked from ``drift_share`` of the median on."""
    p10, p50, p90, p99 = (float(value) for value in np.percentile(durations, (10, 50, 90, 99)))
    spread = _SIGMA_BY_MAD * float(np.median(np.abs(durations - p50)))
    above = p50 + max(_OUTLIER_SIGMAS * spread, _OUTLIER_SHARE * p50)
    return Summary(
        iterations=int(durations.size),
        p10_ns=p10,
        p50_ns=p50,
        p90_ns=p90,
        p99_ns=p99,
        min_ns=float(durations.min()),
        max_ns=float(durations.max()),
        mean_ns=float(durations.mean()),
        stdev_ns=float(durations.std(ddof=1)) if durations.size > 1 else 0.0,
        median=median_interval(durations),
        drift=drift_of(starts, durations, share=drift_share),
        outliers=int((durations > above).sum()),
        outlier_above_ns=above,
    )


def median_interval(durations: Nanoseconds, *, level: float = LEVEL, seed: int = 0) -> Interval | None:
    """Confidence interval of the median of [n] samples in the order of time; None where there are too few."""
    # Blocks of about the cube root of n (Hall, Horowitz and Jing, 1995), and longer where that makes very many.
    blocks = min(durations.size // math.ceil(max(durations.size, 1) ** (1 / 3)), _BLOCKS_MOST)
    if blocks < LEAST_REPEATS:
        return None
    # A resample's median is found by counting: how many samples of each block lie in each bin of values. Up to
    # _BINS_MOST samples each value is a bin of its own, so nothing is rounded.
    shares = np.linspace(0.0, 1.0, min(durations.size, _BINS_MOST))
    edges = np.unique(np.quantile(durations, shares, method="higher"))
    bins = np.searchsorted(edges, durations)
    block_of = np.arange(durations.size) * blocks // durations.size
    counts = np.bincount(block_of * edges.size + bins, minlength=blocks * edges.size).reshape(blocks, edges.size)
    weights = np.random.default_rng(seed).multinomial(blocks, np.full(blocks, 1 / blocks), size=_RESAMPLES)
    below = np.cumsum(weights.astype(np.float64) @ counts.astype(np.float64), axis=1)
    medians = edges[(2 * below >= below[:, -1:]).argmax(axis=1)]
    return _interval(medians.astype(np.float64), blocks, level)


def drift_of(starts: Nanoseconds, durations: Nanoseconds, *, share: float) -> Drift | None:
    """Find a trend over the run; None where there are too few samples to tell.

    Its size is the slope of Theil and Sen over medians of groups; whether it is one, the test of Mann and Kendall, with
    the variance that Hamed and Rao give for autocorrelated data ("A modified Mann-Kendall trend test", 1998).
    """
    groups = min(_GROUPS_MOST, durations.size)
    if groups < 2 * LEAST_REPEATS:
        return None
    pieces = np.array_split(np.arange(durations.size), groups)
    times = np.array([float(np.mean(starts[piece] - starts[0])) for piece in pieces])
    values = np.array([float(np.median(durations[piece])) for piece in pieces])
    first, second = np.triu_indices(groups, 1)
    apart = times[second] - times[first]
    slope = float(np.median((values[second] - values[first]) / np.where(apart > 0, apart, np.inf)))
    change = slope * float(times[-1] - times[0]) / max(float(np.median(values)), 1.0)
    rises = float(np.sign(values[second] - values[first]).sum())
    variance = _trend_variance(values, slope * times)
    score = (abs(rises) - 1) / math.sqrt(variance) if variance > 0 and rises else 0.0
    p_value = min(2 * _NORMAL.cdf(-max(score, 0.0)), 1.0)
    return Drift(change, p_value, p_value < _DRIFT_P and abs(change) > share)


def _trend_variance(values: Floats, trend: Floats) -> float:
    """The variance of Kendall's sum where there is no trend, for values that follow one another."""
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
    return plain * max(more, 1.0)  # alternating samples would make it smaller: that is not counted on


def round_log_ratios(batches: Sequence[Batch]) -> Floats:
    """For each round that has batches of both sides: the logarithm of B's undisturbed time by A's, [rounds]."""
    logs: dict[int, dict[str, list[float]]] = {}
    for batch in batches:
        undisturbed = float(np.quantile(batch.duration_ns, _UNDISTURBED, method="lower"))
        logs.setdefault(batch.round, {"A": [], "B": []})[batch.side].append(math.log(max(undisturbed, 1.0)))
    # A round that was cut off in A B B A is lopsided: what drifts would be taken for a difference.
    whole = [sides for sides in logs.values() if sides["A"] and len(sides["A"]) == len(sides["B"])]
    return np.array([float(np.mean(sides["B"]) - np.mean(sides["A"])) for sides in whole], np.float64)


def compare_rounds(log_ratios: Floats, *, min_effect: float, level: float = LEVEL, seed: int = 0) -> Comparison | None:
    """Whether B is slower or faster than A; None where there are too few rounds to tell.

    A difference is claimed only where the interval of the ratio does not hold 1 and the ratio is off it by more than
    ``min_effect``.
    """
    rounds = log_ratios.size
    if rounds < LEAST_REPEATS:
        return None
    drawn = np.random.default_rng(seed).integers(rounds, size=(_RESAMPLES, rounds))
    ratio = math.exp(float(_centres(log_ratios[None, :])[0]))
    logs = _interval(_centres(log_ratios[drawn]), rounds, level)
    return _judged(ratio, Interval(math.exp(logs.low), math.exp(logs.high), level), int(rounds), min_effect)


def compare_samples(a: Floats, b: Floats, *, min_effect: float, level: float = LEVEL) -> Comparison | None:
    """Whether B's times are slower or faster than A's, of sets that were not measured in turns; None with too few.

    A sample is a whole measurement (a session's median, above 0), not an iteration: what repeats is the session. The
    ratio of geometric means has Student's interval: Welch's ("The generalization of 'Student's' problem when several
    different population variances are involved", 1947) where both sets have :data:`LEAST_REPEATS`, and else that of a
    common variance, which tells even one sample from enough of the other set. Whatever shifts all that a day measures
    is taken for a difference: only what `hil bench` measures in turns is free of that.
    """
    spreads = (spread_of(side, np.zeros(side.size, np.intp), 1) for side in (a, b))
    return compare_spreads(*spreads, min_effect=min_effect, level=level).of(0)


@dataclass(frozen=True, eq=False)
class Spread:
    """Of many sets of samples: how many each has, the mean of their logarithms, and the squares about it, summed."""

    count: Floats
    mean: Floats
    squares: Floats

    def at(self, sets: npt.NDArray[np.intp]) -> Spread:
        """Those of some sets."""
        return Spread(self.count[sets], self.mean[sets], self.squares[sets])


def spread_of(samples: Floats, sets: npt.NDArray[np.intp], count: int) -> Spread:
    """What is to be known of so many sets of samples above 0; ``sets`` says of each sample which set has it."""
    logs = np.log(samples)
    counts = np.bincount(sets, minlength=count).astype(np.float64)
    means = np.bincount(sets, logs, count) / np.maximum(counts, 1)
    squares = np.bincount(sets, (logs - means[sets]) ** 2, count).astype(np.float64)
    return Spread(counts, means, squares)


@dataclass(frozen=True, eq=False)
class Comparisons:
    """Many sets of samples beside as many others."""

    told: npt.NDArray[np.bool_]  # where there are samples enough for an interval; elsewhere the rest says nothing
    ratio: Floats
    low: Floats
    high: Floats
    repeats: Floats
    differs: npt.NDArray[np.bool_]  # whether it is slower or faster
    level: float
    min_effect: float

    def of(self, index: int) -> Comparison | None:
        """The comparison of one pair of sets; None with too few samples."""
        if not self.told[index]:
            return None
        ratio, interval = (
            float(self.ratio[index]),
            Interval(float(self.low[index]), float(self.high[index]), self.level),
        )
        verdict = _verdict(ratio, differs=bool(self.differs[index]))
        return Comparison(ratio, interval, int(self.repeats[index]), self.min_effect, verdict)


def compare_spreads(
    a: Spread, b: Spread, *, min_effect: float, level: float = LEVEL, where: bool | npt.NDArray[np.bool_] = True
) -> Comparisons:
    """:func:`compare_samples` of many pairs of sets at once; elsewhere than ``where`` nothing is told."""
    told = where & (np.minimum(a.count, b.count) >= 1) & (a.count + b.count >= LEAST_REPEATS + 1)
    count_a, count_b = (np.where(told, side.count, LEAST_REPEATS) for side in (a, b))
    pooled = count_a + count_b - 2
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        part_a, part_b = a.squares / (count_a - 1) / count_a, b.squares / (count_b - 1) / count_b
        weights = part_a**2 / (count_a - 1) + part_b**2 / (count_b - 1)
        welch = np.where(weights > 0, (part_a + part_b) ** 2 / weights, pooled)
        common = (a.squares + b.squares) / pooled * (1 / count_a + 1 / count_b)
        each = np.minimum(count_a, count_b) >= LEAST_REPEATS
        freedom, variance = np.where(each, welch, pooled), np.where(each, part_a + part_b, common)
        centre = b.mean - a.mean
        half = student_quantile((1 + level) / 2, freedom) * np.sqrt(variance)
        ratio, low, high = (np.exp(np.minimum(log, _LOG_MOST)) for log in (centre, centre - half, centre + half))
    differs = told & _differs(ratio, low, high, min_effect)
    return Comparisons(told, ratio, low, high, np.minimum(a.count, b.count), differs, level, min_effect)


def _judged(ratio: float, interval: Interval, repeats: int, min_effect: float) -> Comparison:
    differs = bool(_differs(ratio, interval.low, interval.high, min_effect))
    return Comparison(ratio, interval, repeats, min_effect, _verdict(ratio, differs=differs))


def _differs(ratio: Any, low: Any, high: Any, min_effect: float) -> Any:
    """Whether a difference is claimed; of numbers, or of arrays of them."""
    return (abs(ratio - 1) > min_effect) & ((low > 1) | (high < 1))


def _verdict(ratio: float, *, differs: bool) -> str:
    if not differs:
        return "no difference"
    return "slower" if ratio > 1 else "faster"


def is_precise(found: Comparison) -> bool:
    """Whether the ratio is known well enough to tell the smallest effect; says nothing of what the ratio is.

    Measuring on until the interval is narrow leaves its level as it is (Chow and Robbins, 1965), unlike measuring on
    until a difference shows.
    """
    return (found.interval.high - found.interval.low) / 2 <= found.min_effect * found.ratio


def _centres(values: Floats) -> Floats:
    """The centre of each row: its mean without the lowest and the highest fifth (Wilcox, "Introduction to robust
    estimation", 2012), which a few wild rounds do not move and which wastes little where there are none."""
    cut = values.shape[1] // 5
    centres: Floats = np.sort(values, axis=1)[:, cut : values.shape[1] - cut].mean(axis=1)
    return centres


def _interval(resampled: Floats, repeats: int, level: float) -> Interval:
    """The expanded percentile interval: as wide as a t interval of so many repeats."""
    wide = math.sqrt(repeats / (repeats - 1)) * student_quantile((1 + level) / 2, repeats - 1)
    tail = _NORMAL.cdf(-wide)
    low, high = np.quantile(resampled, (tail, 1 - tail))
    return Interval(float(low), float(high), level)


def student_quantile(share: float, freedom: Any) -> Any:
    """The quantile of Student's t distribution, by Abramowitz and Stegun's expansion 26.7.5.

    ``freedom`` is a number, or an array of them.

    From 5 degrees of freedom on it is off by less than 1 % at the 99.5 % quantile.
    """
    z = _NORMAL.inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))

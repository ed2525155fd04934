"""Compare the times of two programs: pure functions of samples with fixed seeds, so results are reproducible.

Consecutive samples are correlated, so they are never treated as independent
(:mod:`hil.controller.devices.measuring.time_statistics`):

- The interval of a ratio is from a bootstrap over rounds. Each round reloads both programs, because the memory layout
  of a process can shift its time by multiple percent (Mytkowicz et al., "Producing wrong data without doing anything
  obviously wrong!", 2009). So the unit of repetition is a round, not a sample (Kalibera and Jones, "Rigorous
  benchmarking in reasonable time", 2013). A round's value is the difference of mean logarithms over A B B A, which
  cancels drift.
- The compared value is a batch's undisturbed time, the fifth percentile. Other load on the machine only makes
  iterations longer. Other load can move a median by more than the effect under test (Chen and Revels, "Robust
  benchmarking in noisy environments", 2016, use the minimum; the percentile does not depend on a single lucky
  iteration).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hil.controller.devices.measuring.time_statistics import (
    DEFAULT_EFFECT,
    LEVEL,
    MIN_REPEATS,
    Floats,
    Nanoseconds,
    bootstrap_interval,
    compute_student_quantile,
)
from hil.controller.pipeline.settings.options import Job
from hil.controller.records.base import Interval
from hil.controller.records.measurements.bench import BenchTimes, SpeedComparison, SpeedVerdict
from hil.core.steps import StepCall

DEFAULT_MIN_TIME_SECONDS = 2.0


@dataclass(frozen=True)
class BenchJob:
    """The settings of a `hil bench` command."""

    job: Job  # settings shared with `hil run`: models, board, inputs, tolerances. One model, or A and B to compare.
    iterations: int | None = None
    min_time_s: float = DEFAULT_MIN_TIME_SECONDS  # minimum measured time per side, in seconds
    warmup: int | None = None
    concurrency: int = 1
    against: str = ""  # a stored bench run to measure as side A, or alone without models
    check: bool = True
    min_effect: float = DEFAULT_EFFECT  # the smallest relative difference to report
    fail_if_slower: float | None = None  # maximum relative slowdown of B against A; None allows any
    benchmark_out: Path | None = None
    sustained_s: float | None = None  # length of a sustained measurement, in seconds; None measures for min_time_s
    settle_s: float | None = None  # maximum wait for a steady board, in seconds; None does not wait
    energy: bool | None = None  # measure the energy; None measures it on boards with a meter


@dataclass(frozen=True)
class Batch:
    """A side's iterations, measured in a single call."""

    side: str
    round: int  # from 0: every round reloads both sides
    copy: int
    start_ns: Nanoseconds  # per iteration, int64 [n], on the side's clock
    duration_ns: Nanoseconds
    calls: tuple[StepCall, ...] = ()  # of a decoder
    instructions: tuple[int, ...] = ()  # per iteration; empty if not counted
    # False if the board's clock counts instructions. The times are then estimates from the host's clock, only for
    # planning, and are not stored.
    is_timed: bool = True
    host_ns: tuple[int, int] = (0, 0)  # of the call, from sending to the last byte received, host clock


_UNDISTURBED = 0.05
_RESAMPLES = 2000
# Approximately the largest x with a finite exp(x).
_MAX_LOG = 709.0


def round_log_ratios(batches: Sequence[Batch]) -> Floats:
    """Return [rounds] log(B's undisturbed time / A's), for complete rounds."""
    logs: dict[int, dict[str, list[float]]] = {}
    for batch in batches:
        undisturbed = float(np.quantile(batch.duration_ns, _UNDISTURBED, method="lower"))
        logs.setdefault(batch.round, {"A": [], "B": []})[batch.side].append(math.log(max(undisturbed, 1.0)))
    # Skip rounds cut off within A B B A: they are unbalanced, so drift would look like a difference.
    whole = [sides for sides in logs.values() if sides["A"] and len(sides["A"]) == len(sides["B"])]
    return np.array([float(np.mean(sides["B"]) - np.mean(sides["A"])) for sides in whole], np.float64)


def compare_rounds(
    log_ratios: Floats, *, min_effect: float, level: float = LEVEL, seed: int = 0
) -> SpeedComparison | None:
    """Compare B with A; return None with fewer rounds than :data:`MIN_REPEATS`.

    A difference is reported only if the ratio's interval excludes 1 and the ratio differs from 1 by more than
    ``min_effect``.
    """
    rounds = log_ratios.size
    if rounds < MIN_REPEATS:
        return None
    drawn = np.random.default_rng(seed).integers(rounds, size=(_RESAMPLES, rounds))
    ratio = math.exp(float(_compute_trimmed_means(log_ratios[None, :])[0]))
    logs = bootstrap_interval(_compute_trimmed_means(log_ratios[drawn]), rounds, level)
    interval = Interval(low=math.exp(logs.low), high=math.exp(logs.high), level=level)
    return _build_comparison(ratio, interval, int(rounds), min_effect)


def compare_medians(a: BenchTimes, b: BenchTimes, *, min_effect: float) -> SpeedComparison | None:
    """Compare the medians of two separate measurements. Return None if one of the intervals is unknown.

    The interval of the ratio combines the intervals of the medians (Donner and Zou, "Closed-form confidence intervals
    for functions of the normal mean and standard deviation", 2012), on the logarithmic scale. A shift between the
    measurements, for example of the memory layout, is not in the interval.
    """
    if a.median is None or b.median is None:
        return None
    ratio = b.p50_ns / max(a.p50_ns, 1.0)
    below = _compute_log_ratio(b.p50_ns, b.median.low), _compute_log_ratio(a.median.high, a.p50_ns)
    above = _compute_log_ratio(b.median.high, b.p50_ns), _compute_log_ratio(a.p50_ns, a.median.low)
    interval = Interval(
        low=ratio * math.exp(-math.hypot(*below)), high=ratio * math.exp(math.hypot(*above)), level=b.median.level
    )
    return _build_comparison(ratio, interval, 1, min_effect)


def _compute_log_ratio(high: float, low: float) -> float:
    """Return the difference of the logarithms of two times in nanoseconds."""
    return math.log(max(high, 1.0) / max(low, 1.0))


def compare_samples(a: Floats, b: Floats, *, min_effect: float, level: float = LEVEL) -> SpeedComparison | None:
    """Compare the times of B and A, which were not measured in turns. Return None with too few samples.

    A sample is a whole measurement (a session's median, above 0), not an iteration: the unit of repetition is the
    session. The ratio of geometric means has a Student interval. If both sets have :data:`MIN_REPEATS` samples, the
    interval is Welch's ("The generalization of 'Student's' problem when multiple different population variances are
    involved", 1947). Otherwise the interval assumes a common variance, so that even a single sample can be compared
    with enough samples in the other set. A shift that affects a whole day's measurements looks like a difference. Only
    the alternating turns in `hil bench` avoid this.
    """
    spreads = (spread_of(side, np.zeros(side.size, np.intp), 1) for side in (a, b))
    return compare_spreads(*spreads, min_effect=min_effect, level=level).compare_pair(0)


@dataclass(frozen=True, eq=False)
class Spread:
    """Statistics of many sample sets: count, mean logarithm, and sum of squared deviations from this mean."""

    count: Floats
    mean: Floats
    squares: Floats

    def at(self, sets: npt.NDArray[np.intp]) -> Spread:
        """Return the statistics of a subset of the sets."""
        return Spread(self.count[sets], self.mean[sets], self.squares[sets])


def spread_of(samples: Floats, sets: npt.NDArray[np.intp], count: int) -> Spread:
    """Return statistics for ``count`` sets of samples above 0; ``sets`` contains the set index of each sample."""
    logs = np.log(samples)
    counts = np.bincount(sets, minlength=count).astype(np.float64)
    means = np.bincount(sets, logs, count) / np.maximum(counts, 1)
    squares = np.bincount(sets, (logs - means[sets]) ** 2, count).astype(np.float64)
    return Spread(counts, means, squares)


@dataclass(frozen=True, eq=False)
class Comparisons:
    """Comparisons of many pairs of sample sets."""

    told: npt.NDArray[np.bool_]  # enough samples for an interval; if False, the other fields are meaningless
    ratio: Floats
    low: Floats
    high: Floats
    repeats: Floats
    differs: npt.NDArray[np.bool_]  # True if B is slower or faster
    level: float
    min_effect: float

    def compare_pair(self, index: int) -> SpeedComparison | None:
        """Return the comparison of a pair of sets; None with too few samples."""
        if not self.told[index]:
            return None
        ratio = float(self.ratio[index])
        return SpeedComparison(
            ratio=ratio,
            interval=Interval(low=float(self.low[index]), high=float(self.high[index]), level=self.level),
            rounds=int(self.repeats[index]),
            min_effect=self.min_effect,
            verdict=_classify_ratio(ratio, differs=bool(self.differs[index])),
        )


def compare_spreads(
    a: Spread, b: Spread, *, min_effect: float, level: float = LEVEL, where: bool | npt.NDArray[np.bool_] = True
) -> Comparisons:
    """Apply :func:`compare_samples` to many pairs at the same time, restricted to ``where``."""
    told = where & (np.minimum(a.count, b.count) >= 1) & (a.count + b.count >= MIN_REPEATS + 1)
    count_a, count_b = (np.where(told, side.count, MIN_REPEATS) for side in (a, b))
    pooled = count_a + count_b - 2
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        part_a, part_b = a.squares / (count_a - 1) / count_a, b.squares / (count_b - 1) / count_b
        weights = part_a**2 / (count_a - 1) + part_b**2 / (count_b - 1)
        welch = np.where(weights > 0, (part_a + part_b) ** 2 / weights, pooled)
        common = (a.squares + b.squares) / pooled * (1 / count_a + 1 / count_b)
        each = np.minimum(count_a, count_b) >= MIN_REPEATS
        freedom, variance = np.where(each, welch, pooled), np.where(each, part_a + part_b, common)
        centre = b.mean - a.mean
        half = compute_student_quantile((1 + level) / 2, freedom) * np.sqrt(variance)
        ratio, low, high = (np.exp(np.minimum(log, _MAX_LOG)) for log in (centre, centre - half, centre + half))
    differs = told & _is_different(ratio, low, high, min_effect)
    return Comparisons(told, ratio, low, high, np.minimum(a.count, b.count), differs, level, min_effect)


def _build_comparison(ratio: float, interval: Interval, repeats: int, min_effect: float) -> SpeedComparison:
    differs = bool(_is_different(ratio, interval.low, interval.high, min_effect))
    verdict = _classify_ratio(ratio, differs=differs)
    return SpeedComparison(ratio=ratio, interval=interval, rounds=repeats, min_effect=min_effect, verdict=verdict)


def _is_different(ratio: Any, low: Any, high: Any, min_effect: float) -> Any:
    """Return True to report a difference, for numbers or arrays."""
    return (abs(ratio - 1) > min_effect) & ((low > 1) | (high < 1))


def _classify_ratio(ratio: float, *, differs: bool) -> SpeedVerdict:
    if not differs:
        return "no difference"
    return "slower" if ratio > 1 else "faster"


def is_precise(found: SpeedComparison) -> bool:
    """Return True if the ratio's interval is narrow enough to detect the smallest effect.

    Measuring until the interval is narrow does not change the level (Chow and Robbins, 1965), unlike measuring until
    a difference appears.
    """
    return (found.interval.high - found.interval.low) / 2 <= found.min_effect * found.ratio


def _compute_trimmed_means(values: Floats) -> Floats:
    """Return the trimmed mean per row, without the lowest and highest fifth.

    Outlier rounds do not affect the trimmed mean. Without outliers, the trimmed mean is still efficient (Wilcox,
    "Introduction to robust estimation", 2012).
    """
    cut = values.shape[1] // 5
    centres: Floats = np.sort(values, axis=1)[:, cut : values.shape[1] - cut].mean(axis=1)
    return centres

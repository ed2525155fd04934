"""The words of a bench: what is asked for, what is measured, and what it comes to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hil.controller.pipeline.options import Job

Nanoseconds: TypeAlias = "npt.NDArray[np.int64]"

# A difference below this is not told as one: it is what a rebuilt program or another memory layout may cost anyway.
DEFAULT_EFFECT = 0.03
DEFAULT_MIN_TIME_S = 2.0


@dataclass(frozen=True)
class BenchJob:
    """What `hil bench` was asked to do.

    Attributes:
        job: what it shares with `hil run`: models, board, inputs, tolerances. One model, or A and B to compare.
        iterations: timed iterations of each side; None measures for ``min_time_s``.
        min_time_s: how long each side is to compute, in seconds.
        warmup: untimed iterations before a program is measured; None is about a tenth of a second of them.
        concurrency: programs loaded and running at the same time.
        against: a stored bench run, measured again as side A.
        check: compare the answer with a reference before anything is measured.
        min_effect: the smallest share that is called a difference.
        fail_if_slower: share by which B may be slower than A; None allows any.
        benchmark_out: file for Google Benchmark's JSON.
    """

    job: Job
    iterations: int | None = None
    min_time_s: float = DEFAULT_MIN_TIME_S
    warmup: int | None = None
    concurrency: int = 1
    against: str = ""
    check: bool = True
    min_effect: float = DEFAULT_EFFECT
    fail_if_slower: float | None = None
    benchmark_out: Path | None = None


@dataclass(frozen=True)
class Batch:
    """Iterations of one side, measured in one go.

    Attributes:
        side: ``A`` or ``B``.
        round: which loading of the program, from 0: both sides are loaded anew for each round.
        copy: which of the programs that run at the same time, from 0.
        start_ns: of each iteration, int64 [n], by the clock that the run names.
        duration_ns: int64 [n].
    """

    side: str
    round: int
    copy: int
    start_ns: Nanoseconds
    duration_ns: Nanoseconds


@dataclass(frozen=True)
class Interval:
    """A confidence interval; ``level`` is the share of cases in which it holds the true value."""

    low: float
    high: float
    level: float


@dataclass(frozen=True)
class Drift:
    """Whether iterations became slower or faster while they were measured.

    Attributes:
        change: from the first to the last, as a share of the median, by the robust slope; 0.02 is 2 % slower.
        p_value: how likely so clear a trend is where there is none.
        marked: whether it is both clear and large enough to be told.
    """

    change: float
    p_value: float
    marked: bool


@dataclass(frozen=True)
class Summary:
    """Statistics of one side's iterations, in nanoseconds.

    Attributes:
        median: its confidence interval, None where there are too few iterations.
        drift: None where there are too few iterations.
        outliers: how many iterations took longer than ``outlier_above_ns``.
    """

    iterations: int
    p10_ns: float
    p50_ns: float
    p90_ns: float
    p99_ns: float
    min_ns: float
    max_ns: float
    mean_ns: float
    stdev_ns: float
    median: Interval | None
    drift: Drift | None
    outliers: int
    outlier_above_ns: float


@dataclass(frozen=True)
class Comparison:
    """B beside A, measured in turns on rounds of newly loaded programs.

    Attributes:
        ratio: B's undisturbed time by A's (:mod:`hil.controller.analysis.bench.stats`): above 1 is slower.
        interval: of the ratio.
        rounds: how many rounds it is from.
        min_effect: the smallest share that is called a difference.
        verdict: ``no difference``, ``faster`` or ``slower``: what B is beside A.
    """

    ratio: float
    interval: Interval
    rounds: int
    min_effect: float
    verdict: str

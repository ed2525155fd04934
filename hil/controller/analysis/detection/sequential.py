"""Decide from interleaved rounds whether a new program is slower than an old program, in as few rounds as possible.

The values are log ratios of rounds, as :func:`hil.controller.analysis.bench.stats.round_log_ratios` returns them: both
programs run in turns on the same board, so that slow changes of the board cancel out.

A decision is possible after every round, so the interval must be valid at all times simultaneously. It is the
confidence sequence of the sequential t-test: a mixture of likelihood ratios over Gaussian effect sizes, with the right
Haar prior on the unknown standard deviation. The mixture is a nonnegative martingale, so Ville's inequality bounds the
probability that the interval ever excludes the true value (Robbins, "Statistical methods related to the law of the
iterated logarithm", 1970; Lai, "On confidence sequences", 1976; formula in Wang and Ramdas, "Anytime-valid t-tests and
confidence sequences for Gaussian means with unknown variance", 2024). Residuals of earlier decisions on the same board
may be added to the residual sum of squares: their means differ but the variance is the same, so the mixture remains a
martingale.

The probabilities of the two errors differ, as in Wald's test ("Sequential analysis", 1947). A false alarm costs trust,
while the next run can find a missed change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from hil.controller.devices.measuring.time_statistics import Floats
from hil.controller.records.base import Interval

ChangeVerdict: TypeAlias = Literal["regressed", "improved", "no change", "undecided"]
Direction: TypeAlias = Literal["slower", "faster", "both"]

# Smallest relative change to detect.
DEFAULT_MIN_EFFECT = 0.02
# Probability of a wrong "regressed" or "improved" per decision: 1 % for a series of 520 decisions.
FALSE_ALARM = 0.01 / 520
# Probability of the verdict "no change" although the smallest effect exists.
MISS = 0.02
# Minimum rounds to estimate the variance.
MIN_ROUNDS = 4

# Variance of the mixture's effect size (change divided by standard deviation). With this value, decisions need about
# ten rounds.
_MIXTURE = 2.0
# Rounds of earlier decisions count as at most this many rounds, because a board's noise changes.
_MAX_FREEDOM = 20
# Ignore the known noise if the variance of the new rounds exceeds it by this factor.
_NOISIER = 3.0
# Limit rounds to this many standard deviations from the median.
_CLIP_SIGMAS = 2.5
# Variance of a standard normal distribution with this limit.
_CLIPPED_VARIANCE = 0.978
# Minimum rounds for clipping. With fewer rounds, the median absolute deviation is often too small.
_MIN_CLIP_ROUNDS = 8
_SIGMA_BY_MAD = 1.4826
# Minimum rounds to estimate the autocorrelation.
_MIN_CORRELATION_ROUNDS = 10
_MAX_CORRELATION = 0.9
# Largest prediction of required rounds.
_MAX_ROUNDS = 10_000


@dataclass(frozen=True)
class RoundNoise:
    """Noise of the rounds' log ratios, estimated from earlier decisions on the same board."""

    variance: float
    freedom: int  # degrees of freedom of the variance


def pool_noise(decisions: Iterable[Sequence[float]]) -> RoundNoise | None:
    """Return the common noise of earlier decisions, from the log ratios of every decision.

    Return None for too few rounds.
    """
    groups = [np.asarray(log_ratios, np.float64) for log_ratios in decisions if len(log_ratios) > 1]
    freedom = sum(group.size - 1 for group in groups)
    if freedom < MIN_ROUNDS:
        return None
    rest = np.concatenate([group - np.median(group) for group in groups])
    limit = _CLIP_SIGMAS * _SIGMA_BY_MAD * float(np.median(np.abs(rest))) * math.sqrt(rest.size / freedom)
    squares = sum(
        float((part - part.mean()) @ (part - part.mean()))
        for part in (np.clip(group - np.median(group), -limit, limit) for group in groups)
    )
    if squares <= 0:
        return None
    return RoundNoise(squares / freedom / _CLIPPED_VARIANCE, min(freedom, _MAX_FREEDOM))


@dataclass(frozen=True)
class Decision:
    """Verdict on the rounds so far."""

    verdict: ChangeVerdict
    rounds: int
    ratio: float  # new time divided by old time, above 1 is slower; 1 without rounds
    interval: Interval | None  # interval of the ratio, valid at all times; None for too few rounds


class SequentialDecision:
    """Collect rounds until the verdict is clear.

    Add the log ratio of every round, and stop at a verdict other than ``undecided`` or when the board time is spent::

        decision = SequentialDecision(min_effect=0.02, direction="slower")
        while decision.verdict == "undecided" and has_board_time():
            decision.add(measure_round())

    Verdicts, with d = ``min_effect``:

    - ``regressed``: the interval is above 1, and the ratio is nearer to 1 + d than to 1.
    - ``improved``: the same for a faster program.
    - ``no change``: the interval excludes 1 + d, and the ratio is nearer to 1 than to 1 + d. With the direction
      ``slower``, this means "not slower", so that a faster program needs fewer rounds. ``faster`` is symmetric, and
      ``both`` requires both conditions.
    - ``undecided``: more rounds are required, about ``rounds_needed``.

    A change below d / 2 usually gives ``no change``. A change between d / 2 and d may give either verdict.
    """

    def __init__(
        self,
        min_effect: float = DEFAULT_MIN_EFFECT,
        *,
        direction: Direction = "both",
        noise: RoundNoise | None = None,
        false_alarm: float = FALSE_ALARM,
        miss: float = MISS,
    ) -> None:
        """Start without rounds.

        ``noise`` of earlier decisions on the same board halves the number of rounds. ``false_alarm`` and ``miss`` are
        probabilities per decision.
        """
        if not 0 < min_effect < 1:
            raise ValueError(f"min_effect must be above 0 and below 1, got {min_effect}")
        self.log_ratios: list[float] = []
        self._min_effect = min_effect
        self._direction: Direction = direction
        self._noise = noise
        self._false_alarm = false_alarm
        self._miss = miss
        self._decision = self._decide()

    def add(self, log_ratio: float) -> None:
        """Add a round: the logarithm of the new program's time divided by the old program's."""
        if not math.isfinite(log_ratio):
            raise ValueError(f"log ratio must be finite, got {log_ratio}")
        self.log_ratios.append(log_ratio)
        self._decision = self._decide()

    def discard_rounds(self) -> None:
        """Remove all rounds, for example because the board throttled."""
        self.log_ratios.clear()
        self._decision = self._decide()

    @property
    def decision(self) -> Decision:
        """The verdict with its statistics."""
        return self._decision

    @property
    def verdict(self) -> ChangeVerdict:
        """The verdict on the rounds so far."""
        return self._decision.verdict

    @property
    def interval(self) -> Interval | None:
        """The interval of the ratio, or None for too few rounds."""
        return self._decision.interval

    @property
    def rounds_needed(self) -> int:
        """The number of additional rounds if estimate and noise stay the same; 0 if decided, at most 10,000."""
        if self.verdict != "undecided":
            return 0
        return _predict_rounds(
            self.log_ratios, self._noise, math.log1p(self._min_effect), self._false_alarm, self._miss
        )

    def _decide(self) -> Decision:
        return decide(
            self.log_ratios,
            self._min_effect,
            direction=self._direction,
            noise=self._noise,
            false_alarm=self._false_alarm,
            miss=self._miss,
        )


def decide(
    log_ratios: Sequence[float],
    min_effect: float = DEFAULT_MIN_EFFECT,
    *,
    direction: Direction = "both",
    noise: RoundNoise | None = None,
    false_alarm: float = FALSE_ALARM,
    miss: float = MISS,
) -> Decision:
    """Return the verdict on log ratios of rounds, as described in :class:`SequentialDecision`."""
    values = _clip_outliers(np.asarray(log_ratios, np.float64), noise)
    centre = float(values.mean()) if values.size else 0.0
    if values.size < MIN_ROUNDS:
        return Decision("undecided", values.size, _limit_exp(centre), None)
    spread = _estimate_spread(values, noise)
    sure, likely = (spread.compute_half_width(values.size, error) for error in (false_alarm, miss))
    verdict = _judge_interval(centre, sure, likely, math.log1p(min_effect), direction)
    is_change = verdict in ("regressed", "improved")
    half, error = (sure, false_alarm) if is_change else (likely, miss)
    interval = Interval(low=_limit_exp(centre - half), high=_limit_exp(centre + half), level=1 - 2 * error)
    return Decision(verdict, values.size, _limit_exp(centre), interval)


def _judge_interval(centre: float, sure: float, likely: float, effect: float, direction: Direction) -> ChangeVerdict:
    """Return the verdict for an estimate and two half widths, for false alarms and for misses.

    All values are logarithms.
    """
    if abs(centre) > max(sure, effect / 2):
        if centre > 0 and direction != "faster":
            return "regressed"
        if centre < 0 and direction != "slower":
            return "improved"
    above = {"slower": centre, "faster": -centre, "both": abs(centre)}[direction]
    return "no change" if above < effect / 2 and above + likely < effect else "undecided"


@dataclass(frozen=True)
class _Spread:
    squares: float  # residual sum of squares, of the rounds and the known noise together
    freedom: int  # degrees of freedom of ``squares``
    known: int  # the part of ``freedom`` from the known noise

    @property
    def variance(self) -> float:
        """Return the variance of a round."""
        return self.squares / self.freedom if self.freedom else 0.0

    def compute_half_width(self, rounds: int, error: float) -> float:
        """Return the half width of the interval with the probability ``error`` on each side."""
        inner = 1 + rounds * _MIXTURE
        total = rounds + self.known
        power = min((-2 * math.log(2 * error) + math.log(inner)) / total, math.log(inner))
        growth = math.exp(power)
        if growth >= inner:
            return math.inf
        return math.sqrt((growth - 1) / (1 - growth / inner) * self.squares / rounds)

    def predict(self, rounds: int) -> _Spread:
        """Return the expected spread for another number of rounds with the same variance."""
        freedom = rounds - 1 + self.known
        return _Spread(self.variance * freedom, freedom, self.known)


def _estimate_spread(values: Floats, noise: RoundNoise | None) -> _Spread:
    freedom = max(int(values.size) - 1, 0)
    squares = 0.0
    if freedom:
        squares = float(((values - values.mean()) ** 2).sum()) * _compute_inflation(values) / _CLIPPED_VARIANCE
    if noise is None or (freedom >= MIN_ROUNDS - 1 and squares / freedom > _NOISIER * noise.variance):
        return _Spread(squares, freedom, 0)
    return _Spread(squares + noise.variance * noise.freedom, freedom + noise.freedom, noise.freedom)


def _compute_inflation(values: Floats) -> float:
    """Return the factor by which autocorrelation increases the mean's variance.

    The factor is (1 + r) / (1 - r) for an autoregressive process of order 1. Only significant positive correlations
    count (one-sided test, 5 %).
    """
    if values.size < _MIN_CORRELATION_ROUNDS:
        return 1.0
    centred = values - values.mean()
    power = float((centred**2).sum())
    # Add 1 / n, because the estimate is too small by about this value (Kendall, 1954).
    lag = float((centred[1:] * centred[:-1]).sum()) / power + 1 / values.size if power > 0 else 0.0
    if lag < 1.645 / math.sqrt(values.size):
        return 1.0
    lag = min(lag, _MAX_CORRELATION)
    return (1 + lag) / (1 - lag)


def _clip_outliers(values: Floats, noise: RoundNoise | None) -> Floats:
    """Limit outliers, so that a single disturbed round neither hides nor causes a change."""
    if values.size < _MIN_CLIP_ROUNDS:
        return values
    centre = _compute_median(values)
    scale = _SIGMA_BY_MAD * _compute_median(np.abs(values - centre))
    limit = _CLIP_SIGMAS * max(scale, math.sqrt(noise.variance) if noise else 0.0)
    return np.clip(values, centre - limit, centre + limit) if limit > 0 else values


def _compute_median(values: Floats) -> float:
    ordered = np.sort(values)  # faster than np.median for few values
    return float(ordered[(values.size - 1) // 2] + ordered[values.size // 2]) / 2


def _predict_rounds(
    log_ratios: Sequence[float], noise: RoundNoise | None, effect: float, false_alarm: float, miss: float
) -> int:
    values = _clip_outliers(np.asarray(log_ratios, np.float64), noise)
    rounds = int(values.size)
    spread = _estimate_spread(values, noise)
    if not spread.freedom:
        return MIN_ROUNDS - rounds
    above = abs(float(values.mean())) if rounds >= MIN_ROUNDS else 0.0
    error, distance = (false_alarm, above) if above > effect / 2 else (miss, effect - above)
    low, high = max(rounds, MIN_ROUNDS - 1), _MAX_ROUNDS
    while high - low > 1:
        middle = (low + high) // 2
        if spread.predict(middle).compute_half_width(middle, error) < distance:
            high = middle
        else:
            low = middle
    return high - rounds


def _limit_exp(log: float) -> float:
    return math.exp(min(log, 700.0))

"""Find the programs to measure again after a new run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from hil.controller.analysis.detection.changes import find_changes
from hil.controller.analysis.detection.sequential import DEFAULT_MIN_EFFECT
from hil.controller.devices.measuring.time_statistics import Floats, measure_drift
from hil.core.results import BOARD_OUTCOMES, Outcome

# Probability that a step of the smallest effect becomes a suspect at once, unless MAX_SHARE limits it.
POWER = 0.98
# Approximate maximum share of suspects among runs without a change.
MAX_SHARE = 0.6
# Number of recent runs from which the level and the noise are estimated.
_MAX_BASELINE_RUNS = 100
# Minimum runs to estimate the noise.
_MIN_BASELINE_RUNS = 8
# Limit of the p-value for a faster level. A faster level is not urgent, so several runs may be needed to find it.
_FASTER_P = 0.01
# After a drift measurement, drift can become a suspect again only after this many runs.
_DRIFT_PAUSE = 26
_MIN_DRIFT_RUNS = 30
# Share of the smallest effect that an estimated drift must exceed. The share is below 1, because the estimate has
# noise.
_DRIFT_SHARE = 0.5
_SIGMA_BY_MAD = 1.4826
_NORMAL = NormalDist()
_UNIT_NS = 1e9

SuspectKind = Literal["step", "drift", "outcome", "grade"]


@dataclass(frozen=True)
class SeriesPoint:
    """A run in a series of the same case, metric and board."""

    value: float | None  # median time, above 0; None if the run has no comparable time
    outcome: Outcome = Outcome.PASS


@dataclass(frozen=True)
class Suspect:
    """A change to confirm by measuring the program of ``newest`` in turns with the program of ``baseline``."""

    kind: SuspectKind
    direction: Literal["slower", "faster", "broken", "fixed"]
    index: int  # first run that is probably affected; runs between ``baseline`` and this run may also be affected
    baseline: int  # run with the older program
    newest: int  # run with the newer program, the last run that is not a board error
    ratio: float | None  # estimated new value divided by old value; None for outcomes and grades
    p_value: float | None  # probability of such a change by chance; None for outcomes and grades


def find_suspects(
    series: Sequence[SeriesPoint],
    *,
    min_effect: float = DEFAULT_MIN_EFFECT,
    good: int | None = None,
    anchor: int | None = None,
    drift_checked: int | None = None,
) -> list[Suspect]:
    """Return the suspects that the newest run of a series shows, most serious first, with at most one per kind.

    Runs with board errors are skipped. Tests of times also skip runs without a value.

    Arguments:
        series: runs in time order.
        min_effect: smallest relative change to detect.
        good: the newest run that a measurement confirmed as unchanged, or that the user accepted as the new level.
            Steps are measured relative to this run, so that a later run can find a step that was missed before.
            Default: the run before the newest.
        anchor: reference run for drift, such as the last release. Default: the first run.
        drift_checked: the newest run for which a measurement found no drift. Drift is tested again 26 runs later.
    """
    usable = [number for number, point in enumerate(series) if point.outcome not in BOARD_OUTCOMES]
    if not usable:
        return []
    suspects = [find_outcome_change(series, usable)]
    timed = [number for number in usable if series[number].value is not None]
    # Also compare the times of a program with wrong outputs, because they may explain the outputs.
    if timed and timed[-1] == usable[-1]:
        values = np.array([series[number].value for number in timed], np.float64)
        if not (np.isfinite(values) & (values > 0)).all():
            raise ValueError("values of a series must be finite and above 0")
        suspects.append(_find_step(values, timed, min_effect, good))
        start = next((place for place, number in enumerate(timed) if number >= (anchor or 0)), 0)
        if drift_checked is None or usable[-1] >= drift_checked + _DRIFT_PAUSE:
            suspects.append(find_drift(values[start:], timed[start:], min_effect))
    return [suspect for suspect in suspects if suspect is not None]


def find_outcome_change(series: Sequence[SeriesPoint], usable: Sequence[int]) -> Suspect | None:
    """Return a suspect if the newest usable run passes and the previous usable run did not, or the reverse."""
    if len(usable) < 2:
        return None
    before, newest = usable[-2:]
    passed, passes = (series[number].outcome.exit_code == 0 for number in (before, newest))
    if passed == passes:
        return None
    return Suspect("outcome", "fixed" if passes else "broken", newest, before, newest, None, None)


def find_drift(values: Floats, numbers: Sequence[int], min_effect: float) -> Suspect | None:
    """Return a suspect if the values of the runs ``numbers`` have risen slowly since the first of these runs.

    Uses the Theil-Sen slope and the Mann-Kendall test for autocorrelated data, as
    :func:`hil.controller.devices.measuring.time_statistics.measure_drift` describes.
    """
    if values.size < _MIN_DRIFT_RUNS:
        return None
    scaled = np.rint(values / np.median(values) * _UNIT_NS).astype(np.int64)
    drift = measure_drift(np.arange(values.size), scaled, share=_DRIFT_SHARE * min_effect)
    if drift is None or not drift.marked or drift.change < 0:
        return None
    return Suspect("drift", "slower", numbers[0], numbers[0], numbers[-1], 1 + drift.change, drift.p_value)


def _find_step(values: Floats, numbers: Sequence[int], min_effect: float, good: int | None) -> Suspect | None:
    """Return a suspect if a step of the smallest effect since the good run cannot be excluded."""
    if values.size < 2:
        return None
    place = max((at for at, number in enumerate(numbers[:-1]) if good is None or number <= good), default=0)
    edges = [change.index for change in find_changes(values[:-1].tolist())]
    start = max((edge for edge in edges if edge <= place), default=0)
    stop = min((edge for edge in edges if edge > place), default=values.size - 1)
    logs = np.log(values)
    baseline = logs[max(start, stop - _MAX_BASELINE_RUNS) : stop]
    level = float(np.median(baseline))
    excess = float(logs[-1]) - level
    if excess > _compute_threshold(baseline, math.log1p(min_effect)):
        index = _locate_step(logs[place + 1 :], level, excess)
        return Suspect(
            "step",
            "slower",
            numbers[place + 1 + index],
            numbers[place],
            numbers[-1],
            math.exp(excess),
            _compute_p_value(baseline, excess),
        )
    recent = [change for change in find_changes(values.tolist(), p_value=_FASTER_P) if change.index > place]
    last = recent[-1] if recent else None
    if last is not None and last.ratio is not None and last.ratio < 1 - min_effect / 2:
        return Suspect("step", "faster", numbers[last.index], numbers[place], numbers[-1], last.ratio, last.p_value)
    return None


def _compute_threshold(baseline: Floats, effect: float) -> float:
    """Return the smallest suspicious logarithm of a new value, relative to the baseline's median.

    A step shifts the distribution of the baseline by ``effect``. The threshold is a lower quantile of the shifted
    distribution, so that a step exceeds it with the probability POWER. With little noise, the threshold is half the
    effect, which is rare without a step. With strong noise, MAX_SHARE limits the share of suspects without a step.
    """
    rest = baseline - np.median(baseline)
    limit = float(np.quantile(rest, 1 - MAX_SHARE))
    if rest.size < _MIN_BASELINE_RUNS:
        return limit
    normal = -_NORMAL.inv_cdf(POWER) * _SIGMA_BY_MAD * float(np.median(np.abs(rest)))
    lowest = min(normal, float(np.quantile(rest, 1 - POWER)))
    return max(min(lowest + effect, effect / 2), limit)


def _compute_p_value(baseline: Floats, excess: float) -> float:
    """Return the share of runs that exceed the level by at least ``excess``, counting the new run."""
    rest = baseline - np.median(baseline)
    return (1 + int((rest >= excess).sum())) / (1 + rest.size)


def _locate_step(logs: Floats, level: float, excess: float) -> int:
    """Return the most likely first run of a step to ``level + excess``, among the runs since the good run."""
    # Minimize absolute deviations: runs before the step are at the level, and later runs are above the level by the
    # excess.
    before = np.concatenate(([0.0], np.cumsum(np.abs(logs - level))))
    after = np.abs(logs - level - excess)
    costs = before[:-1] + np.cumsum(after[::-1])[::-1]
    return int(costs.argmin())

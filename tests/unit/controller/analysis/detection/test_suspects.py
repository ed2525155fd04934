"""Suspects after each new run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hil.controller.analysis.detection.suspects import SeriesPoint, find_suspects
from hil.core.results import Outcome


def points(logs: np.ndarray) -> list[SeriesPoint]:
    return [SeriesPoint(float(value)) for value in np.exp(logs)]


def noise(seed: int, count: int = 101, spread: float = 0.01) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, count)


def count_steps(step: float, spread: float = 0.01, repeats: int = 50) -> int:
    found = 0
    for seed in range(repeats):
        logs = noise(seed, spread=spread)
        logs[-1] += np.log1p(step)
        found += any(suspect.direction == "slower" for suspect in find_suspects(points(logs), drift_checked=100))
    return found


def test_step_is_suspect_after_one_run():
    assert count_steps(0.02) >= 47
    assert count_steps(0.02, spread=0.005) >= 46
    assert count_steps(0.05, spread=0.02) >= 48
    assert count_steps(0.015, spread=0.001) == 50


def test_share_of_suspects_without_step_is_limited():
    assert count_steps(0.0) <= 34
    assert count_steps(0.0, spread=0.03) <= 36
    assert count_steps(0.0, spread=0.004) <= 6


def test_step_is_measured_against_good_run_and_located():
    logs = noise(1, 60)
    logs[55:] += 0.08
    (suspect,) = find_suspects(points(logs), good=50)
    assert (suspect.kind, suspect.baseline, suspect.index, suspect.newest) == ("step", 50, 55, 59)
    assert suspect.ratio == pytest.approx(1.08, abs=0.03)
    assert suspect.p_value is not None and suspect.p_value < 0.05


def test_accepted_step_is_the_new_level():
    logs = noise(2, 40, 0.002)
    logs[20:] += 0.1
    assert find_suspects(points(logs), good=38) == []


def test_faster_level_is_suspect_after_some_runs():
    logs = noise(3, 60, 0.005)
    logs[52:] -= 0.03
    (suspect,) = find_suspects(points(logs), good=50)
    assert (suspect.direction, suspect.baseline) == ("faster", 50)
    assert suspect.index == pytest.approx(52, abs=1)


def test_slow_drift_is_measured_against_anchor():
    logs = noise(4, 520) + np.log1p(0.023) * np.arange(520) / 519
    logs[-1] = 0.0  # no step
    (suspect,) = find_suspects(points(logs))
    assert (suspect.kind, suspect.baseline, suspect.newest) == ("drift", 0, 519)
    assert suspect.ratio == pytest.approx(1.023, abs=0.006)
    assert find_suspects(points(logs), drift_checked=500) == []
    assert [one.baseline for one in find_suspects(points(logs), anchor=40)] == [40]


def test_constant_series_has_a_suspect_only_after_a_change():
    assert find_suspects([SeriesPoint(1000.0)] * 60, min_effect=0.001) == []
    (suspect,) = find_suspects([*[SeriesPoint(1000.0)] * 60, SeriesPoint(1002.0)], min_effect=0.001)
    assert suspect.index == 60


def test_outcome_change_ignores_board_errors():
    ok, lost = SeriesPoint(1.0), SeriesPoint(None, Outcome.BOARD_LOST)
    wrong = SeriesPoint(None, Outcome.FAIL)
    assert find_suspects([ok, ok, lost]) == []
    (suspect,) = find_suspects([ok, ok, lost, wrong, lost])
    assert (suspect.kind, suspect.direction, suspect.baseline, suspect.newest) == ("outcome", "broken", 1, 3)
    (suspect,) = find_suspects([wrong, lost, replace(ok, outcome=Outcome.XFAIL)])
    assert suspect.direction == "fixed"


def test_first_runs_have_no_suspects_without_a_slower_run():
    assert find_suspects([]) == []
    assert find_suspects([SeriesPoint(1.0)]) == []
    assert find_suspects([SeriesPoint(1.0), SeriesPoint(0.9)]) == []
    assert [one.baseline for one in find_suspects([SeriesPoint(1.0), SeriesPoint(1.1)])] == [0]


def test_run_without_time_is_not_a_step():
    assert find_suspects([SeriesPoint(1.0), SeriesPoint(1.1), SeriesPoint(None)]) == []


def test_invalid_time_is_an_error():
    with pytest.raises(ValueError, match="above 0"):
        find_suspects([SeriesPoint(1.0), SeriesPoint(0.0)])

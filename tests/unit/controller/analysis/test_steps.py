import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hil.controller.analysis.steps import MIN_SAMPLES, estimate_noise, find_levels, find_steps

LEAST = math.log1p(0.03)
SERIES = st.lists(st.floats(-1e6, 1e6), max_size=60)


@pytest.mark.ci
@pytest.mark.parametrize("count", [8, 12, 20, 50, 200, 1000])
@pytest.mark.parametrize("kind", ["normal", "laplace"])
def test_steps_are_rare_in_plain_noise(count, kind):
    rolled = np.random.default_rng(count)
    tries = 1000 if count < 1000 else 200
    noise = (getattr(rolled, kind)(0, 0.05, count) for _ in range(tries))
    assert sum(bool(find_steps(one, least=1e-6)) for one in noise) / tries <= 0.02


def test_steps_ignore_noise_below_least():
    rolled = np.random.default_rng(0)
    assert not any(find_steps(rolled.normal(0, 0.01, 100), least=LEAST) for _ in range(1000))


@pytest.mark.parametrize(("count", "after"), [(30, 5), (100, 3), (100, 50), (1000, 10)])
def test_steps_find_8_percent_change(count, after):
    rolled = np.random.default_rng(2)
    found = 0
    for _ in range(200):
        series = rolled.normal(0, 0.015, count)
        series[count - after :] += math.log(1.08)
        found += any(abs(one - (count - after)) <= 1 for one in find_steps(series, least=LEAST))
    assert found / 200 > 0.9


def test_steps_find_rise_and_fall():
    series = np.random.default_rng(3).normal(0, 0.01, 60)
    series[20:35] += 0.1
    assert find_steps(series, least=LEAST) == [20, 35]


@pytest.mark.parametrize("place", [0, 10, 39])
def test_steps_ignore_single_outlier(place):
    series = np.random.default_rng(4).normal(0, 0.01, 40)
    series[place] += 5.0
    assert find_steps(series, least=LEAST) == []


@pytest.mark.parametrize("wild", [19.0, 24.24, 60.0])
@pytest.mark.parametrize("place", range(8))
def test_steps_do_not_move_with_single_outlier(place, wild):
    series = [20.15, 20.2, 20.25, 20.14, 21.75, 21.74, 21.77, 21.75]
    series[place] = wild
    # If the new level starts with the outlier, the step is detected one sample later.
    after = 5 if place == 4 else 4
    assert find_steps(np.log(series), least=LEAST) == [after]


def test_steps_need_three_following_measurements():
    before = [20.15, 20.2, 20.25, 20.14, 20.2, 20.21]
    for after in range(1, 6):
        found = find_steps(np.log(before + [21.75] * after), least=LEAST)
        assert found == ([6] if after >= 3 else []), after


def test_steps_found_in_series_without_noise():
    assert find_steps([100.0] * 10 + [101.0] * 10, least=1.0) == [10]
    assert find_steps([100.0] * 20, least=1.0) == []


def test_steps_need_enough_numbers():
    assert find_steps([0.0] * (MIN_SAMPLES // 2) + [9.0] * (MIN_SAMPLES // 2 - 1), least=LEAST) == []
    assert find_steps([math.nan] * 20, least=LEAST) == []
    assert find_levels([], []) == []
    assert estimate_noise(np.array([1.0])) == 0.0


@given(SERIES, st.floats(1e-3, 1e3))
def test_steps_match_levels_and_respect_least(series, least):
    steps = find_steps(series, least=least)
    found = find_levels(series, steps)
    assert steps == sorted(set(steps))
    assert [index for one in found for index in range(one.start, one.end)] == list(range(len(series)))
    assert all(one.low <= one.median <= one.high for one in found)


@given(SERIES, st.floats(-1e3, 1e3))
def test_steps_do_not_depend_on_sign(series, least):
    least = abs(least) + 1e-3
    assert find_steps(series, least=least) == find_steps([-one for one in series], least=least)

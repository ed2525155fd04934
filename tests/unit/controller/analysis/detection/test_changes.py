"""Changes of level in series of runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hil.controller.analysis.detection.changes import find_changes


def series(seed: int, *levels: tuple[int, float]) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.concatenate([level * np.exp(rng.normal(0, 0.01, count)) for count, level in levels])


def test_find_changes_finds_both_edges_of_a_slow_period():
    found = find_changes(series(1, (40, 1.0), (30, 1.03), (30, 1.0)).tolist())
    assert [change.index for change in found] == pytest.approx([40, 70], abs=2)
    assert [change.ratio for change in found] == pytest.approx([1.03, 1 / 1.03], abs=0.01)
    assert all(change.p_value <= 0.001 for change in found)


def test_find_changes_is_empty_without_change():
    assert sum(bool(find_changes(series(seed, (60, 5.0)).tolist())) for seed in range(50)) <= 1


def test_find_changes_ignores_outliers():
    values = series(3, (60, 1.0))
    values[[7, 31, 32, 55]] *= 1.5
    assert find_changes(values.tolist()) == []


def test_find_changes_allows_for_autocorrelation():
    rng, alarms = np.random.default_rng(4), 0
    for _ in range(50):
        noise = rng.normal(0, 1, 80)
        for number in range(1, 80):
            noise[number] = 0.7 * noise[number - 1] + 0.7 * noise[number]
        alarms += bool(find_changes(np.exp(0.01 * noise).tolist()))
    assert alarms <= 10


def test_find_changes_searches_newest_values_of_long_series():
    found = find_changes(series(5, (100, 2.0), (270, 1.0), (30, 1.05)).tolist())
    assert [change.index for change in found] == pytest.approx([370], abs=1)


@given(st.lists(st.floats(0.1, 10), max_size=40), st.floats(1e-6, 1e9))
@settings(max_examples=40, deadline=None)
def test_find_changes_does_not_depend_on_unit(values: list[float], unit: float):
    rounded = [2.0 ** round(value) for value in values]  # so that a factor keeps ties
    scaled = [value * 2.0 ** round(np.log2(unit)) for value in rounded]
    assert [change.index for change in find_changes(scaled)] == [change.index for change in find_changes(rounded)]


@pytest.mark.parametrize(("before", "after"), [(-3.0, -5.0), (0.0, -1.0), (-1.0, 2.0), (5.0, 0.0)])
def test_find_changes_finds_levels_of_any_sign(before: float, after: float) -> None:
    noise = np.random.default_rng(6).normal(0, 0.1, 40)
    (change,) = find_changes((np.repeat([before, after], 20) + noise).tolist())
    assert change.index == 20 and change.ratio is None
    assert (change.before, change.after) == (pytest.approx(before, abs=0.1), pytest.approx(after, abs=0.1))

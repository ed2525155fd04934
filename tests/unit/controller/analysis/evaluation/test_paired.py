"""Statistics of paired scores, compared with known values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hil.controller.analysis.evaluation.paired import (
    compute_bootstrap_interval,
    compute_mcnemar_p_value,
    compute_tango_interval,
)

Z = 1.959964


@pytest.mark.parametrize(
    ("only_first", "only_second", "p_value"),
    [(0, 0, 1.0), (0, 5, 0.0625), (1, 8, 0.0390625), (10, 10, 1.0), (0, 20, 2 * 0.5**20), (3, 7, 0.34375)],
)
def test_mcnemar_matches_binomial_test(only_first: int, only_second: int, p_value: float) -> None:
    assert compute_mcnemar_p_value(only_first, only_second) == pytest.approx(p_value)
    assert compute_mcnemar_p_value(only_second, only_first) == pytest.approx(p_value)


def test_mcnemar_supports_large_counts() -> None:
    assert compute_mcnemar_p_value(5000, 5200) == pytest.approx(
        math.erfc(199 / math.sqrt(10200) / math.sqrt(2)), rel=0.01
    )


def test_tango_interval_without_discordant_samples() -> None:
    low, high = compute_tango_interval(0, 0, 64)
    assert high == pytest.approx(Z**2 / (64 + Z**2), abs=1e-5)
    assert low == pytest.approx(-high)


@pytest.mark.parametrize(("first", "second", "samples"), [(12, 2, 50), (0, 7, 40), (30, 30, 100)])
def test_tango_interval_ends_have_extreme_scores(first: int, second: int, samples: int) -> None:
    low, high = compute_tango_interval(first, second, samples)
    assert low < (first - second) / samples < high
    assert compute_tango_interval(second, first, samples) == pytest.approx((-high, -low))
    for end in (low, high):
        # The share of the second kind with the largest likelihood, by brute force.
        shares = np.linspace(max(0.0, -end), (1 - end) / 2, 200_001)[1:-1]
        shares = shares[shares + end > 0]
        rest = samples - first - second
        likelihood = first * np.log(shares + end) + second * np.log(shares) + rest * np.log(1 - 2 * shares - end)
        share = shares[int(np.nanargmax(likelihood))]
        deviation = math.sqrt(samples * (2 * share + end - end**2))
        assert abs(first - second - samples * end) / deviation == pytest.approx(Z, abs=0.01)


def test_bootstrap_interval_is_paired_and_seeded() -> None:
    random = np.random.default_rng(0)
    base = random.normal(size=400)
    moved = base + 0.1 + random.normal(scale=0.1, size=400)

    def score(values: np.ndarray):
        return lambda weights: float(np.average(values, weights=weights))

    found = compute_bootstrap_interval(score(moved), score(base), 400, seed=1)
    assert found == compute_bootstrap_interval(score(moved), score(base), 400, seed=1)
    # The standard error of the paired mean is 0.005, that of unpaired means 0.07.
    assert found is not None and found[0] < 0.1 < found[1] and 0.015 < found[1] - found[0] < 0.025
    assert compute_bootstrap_interval(score(moved * np.nan), score(base), 400, seed=1) is None
    assert compute_bootstrap_interval(score(moved[:1]), score(base[:1]), 1, seed=1) is None

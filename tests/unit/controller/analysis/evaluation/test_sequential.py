"""The sequential test: rates of wrong decisions on generated datasets, and early decisions."""

from __future__ import annotations

import numpy as np
import pytest

from hil.controller.analysis.evaluation.sequential import ERROR, bound_mean, decide_mean, measure_evidence

TOTAL = 300


def build_population(lost: int, won: int, total: int = TOTAL) -> np.ndarray:
    """Return gains in 0..1: 0 for a lost sample, 1 for a won sample, 0.5 otherwise."""
    return np.array([0.0] * lost + [1.0] * won + [0.5] * (total - lost - won))


@pytest.mark.parametrize(("lost", "won"), [(16, 0), (31, 15), (4, 0)])
def test_decision_is_seldom_wrong(lost: int, won: int) -> None:
    """Test the worst cases: the drop is a sample above or below the limit of 5 %."""
    population = build_population(lost, won)
    limit, random = 0.475, np.random.default_rng(7)
    is_above = population.mean() >= limit
    wrong = 0
    for _ in range(300):
        values = random.permutation(population)
        # The evidence of all earlier stops at once.
        against, rest = (values, limit) if not is_above else (1 - values, 1 - limit)
        wrong += measure_evidence(against[:-1], TOTAL, rest).max() >= -np.log(ERROR)
    assert wrong / 300 <= 3 * ERROR


def test_decision_is_exact_after_all_samples() -> None:
    assert decide_mean(build_population(15, 0), TOTAL, 0.475) == "above"
    assert decide_mean(build_population(16, 0), TOTAL, 0.475) == "below"


def find_stop(values: np.ndarray, limit: float) -> tuple[int, str]:
    """Return the number of samples until a decision, and the decision."""
    for count in range(1, len(values) + 1):
        if decided := decide_mean(values[:count], len(values), limit):
            return count, decided
    raise AssertionError("undecided after all samples")


@pytest.mark.parametrize(("lost", "decision", "most"), [(0, "above", 250), (200, "below", 150)])
def test_clear_answers_stop_early(lost: int, decision: str, most: int) -> None:
    values = np.random.default_rng(3).permutation(build_population(lost, 0, 1000))
    count, decided = find_stop(values, 0.475)
    assert decided == decision and count <= most


def test_interval_contains_mean_and_shrinks_to_it() -> None:
    population = build_population(20, 5)
    random, missed = np.random.default_rng(5), 0
    for _ in range(40):
        values = random.permutation(population)
        low, high = bound_mean(values[:120], TOTAL)
        missed += not low <= population.mean() <= high
        assert high - low < 0.25
    assert missed <= 4
    assert bound_mean(population, TOTAL) == pytest.approx((population.mean(),) * 2)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_extreme_values_are_supported(value: float) -> None:
    values = np.full(10, value)
    assert decide_mean(values, 20, 0.5) in ("above" if value else "below", "")
    low, high = bound_mean(values, 20)
    assert 0 <= low <= value <= high <= 1

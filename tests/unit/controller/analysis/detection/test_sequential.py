"""Sequential decisions hold at their stated rates."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hil.controller.analysis.detection.sequential import (
    MIN_ROUNDS,
    RoundNoise,
    SequentialDecision,
    decide,
    pool_noise,
)

ROUND = 0.01 * math.sqrt(2)  # two measurements with 1 % noise
NOISE = RoundNoise(ROUND**2, 20)
LOGS = st.lists(st.floats(-1, 1), max_size=30)


def decide_rounds(rng: np.random.Generator, change: float, *, outliers: float = 0.0, **settings) -> SequentialDecision:
    decision = SequentialDecision(0.02, **settings)
    while decision.verdict == "undecided":
        wild = rng.choice((-0.3, 0.3)) if rng.random() < outliers else 0.0
        decision.add(math.log1p(change) + rng.normal(0, ROUND) + wild)
    return decision


def decide_many(change: float, count: int = 50, **settings) -> tuple[list[str], float]:
    rng = np.random.default_rng(5)
    decisions = [decide_rounds(rng, change, **settings) for _ in range(count)]
    return [one.verdict for one in decisions], float(np.mean([len(one.log_ratios) for one in decisions]))


def test_decision_finds_two_percent_step_in_one_percent_noise():
    verdicts, rounds = decide_many(0.02, noise=NOISE, direction="slower")
    assert verdicts.count("regressed") >= 48
    assert rounds < 25


def test_decision_rejects_suspect_without_change_in_few_rounds():
    verdicts, rounds = decide_many(0.0, noise=NOISE, direction="slower")
    assert verdicts.count("no change") == 50
    assert rounds < 9


def test_decision_without_known_noise_needs_more_rounds():
    verdicts, rounds = decide_many(0.02, count=20)
    assert verdicts.count("regressed") >= 19
    assert decide_many(0.02, count=20, noise=NOISE)[1] < rounds < 40


def test_decision_with_outliers_stays_correct():
    verdicts, rounds = decide_many(0.02, count=20, outliers=0.1, noise=NOISE)
    assert verdicts.count("regressed") >= 19
    assert rounds < 60
    assert "regressed" not in decide_many(0.0, count=20, outliers=0.1, noise=NOISE)[0]


def test_decision_ignores_known_noise_below_actual_noise():
    verdicts, _ = decide_many(0.0, noise=RoundNoise(NOISE.variance / 9, 20))
    assert verdicts.count("no change") >= len(verdicts) - 1


def test_faster_program_is_not_slower_and_improved_otherwise():
    fast = math.log1p(-0.06) + ROUND * np.tile([1.0, -1.0, 0.5, -0.5], 10)
    assert decide(fast.tolist(), direction="slower").verdict == "no change"
    assert decide(fast.tolist(), direction="faster").verdict == "improved"
    assert decide(fast.tolist()).verdict == "improved"


def test_decision_predicts_remaining_rounds():
    steady = math.log1p(0.02) + ROUND * np.tile([1.0, -1.0, 0.5, -0.5], 30)
    decision = SequentialDecision(0.02)
    assert decision.rounds_needed == MIN_ROUNDS
    for value in steady[:8]:
        decision.add(float(value))
    predicted = decision.rounds_needed + 8
    while decision.verdict == "undecided":
        decision.add(float(steady[len(decision.log_ratios)]))
    assert predicted / 2 < len(decision.log_ratios) < predicted * 2
    assert decision.rounds_needed == 0
    assert decision.interval is not None and decision.interval.low > 1


@given(LOGS)
@settings(max_examples=50)
def test_decision_of_inverse_ratios_is_mirrored(logs: list[float]):
    mirrored = {"regressed": "improved", "improved": "regressed"}
    found, inverse = decide(logs), decide([-value for value in logs])
    assert inverse.verdict == mirrored.get(found.verdict, found.verdict)
    assert inverse.ratio == pytest.approx(1 / found.ratio)
    if found.interval is not None and math.isfinite(found.interval.high):
        assert found.interval.low <= found.ratio <= found.interval.high


def test_counts_without_noise_need_few_rounds():
    assert decide([math.log(1.001)] * 10, 0.001).verdict == "regressed"
    assert decide([0.0] * 10, 0.001).verdict == "no change"


def test_pool_noise_ignores_levels_and_outliers():
    rng = np.random.default_rng(2)
    groups = [rng.normal(level, ROUND, 12) for level in (-0.1, 0.0, 0.2)]
    groups[1][3] = 2.0
    noise = pool_noise([group.tolist() for group in groups])
    assert noise is not None
    assert math.sqrt(noise.variance) == pytest.approx(ROUND, rel=0.3)
    assert pool_noise([[0.1], [0.2, 0.3]]) is None
    assert pool_noise([[0.0] * 10]) is None


def test_decision_rejects_invalid_values():
    with pytest.raises(ValueError, match="min_effect"):
        SequentialDecision(0.0)
    with pytest.raises(ValueError, match="finite"):
        SequentialDecision().add(math.nan)

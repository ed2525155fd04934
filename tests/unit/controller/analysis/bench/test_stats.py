"""Bench statistics hold at their stated rates."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hil.controller.analysis.bench.stats import Batch, compare_rounds, is_precise, round_log_ratios
from hil.controller.devices.measuring.time_statistics import (
    MIN_REPEATS,
    compute_median_interval,
    compute_student_quantile,
    measure_drift,
    summarise,
)

TIMES = st.lists(st.integers(1, 10**9), min_size=1, max_size=200)
LOGS = st.lists(st.floats(-1, 1), min_size=MIN_REPEATS, max_size=30)


def starts_of(durations: np.ndarray) -> np.ndarray:
    return np.cumsum(durations) - durations


def alike(rng: np.random.Generator, count: int, *, share: float, memory: float) -> np.ndarray:
    """Return autocorrelated noise of mean 0; each value keeps a share ``memory`` of the previous value."""
    noise = np.empty(count)
    noise[0] = rng.normal()
    for number in range(1, count):
        noise[number] = memory * noise[number - 1] + math.sqrt(1 - memory**2) * rng.normal()
    return share * noise


def machine(rng: np.random.Generator, *, ratio: float = 1.0, rounds: int = 20) -> list[Batch]:
    """Simulate two programs on a noisy machine: autocorrelated noise, spikes, drift, and a different speed per load."""
    batches, drift = [], rng.uniform(-0.3, 0.3)
    weather = alike(rng, rounds * 4, share=0.05, memory=0.9)
    for number in range(rounds):
        level = {"A": 50_000 * np.exp(rng.normal(0, 0.01)), "B": 50_000 * ratio * np.exp(rng.normal(0, 0.01))}
        first, second = rng.permutation(["A", "B"])
        for place, side in enumerate((first, second, second, first)):
            at = number * 4 + place
            times = level[side] * np.exp(weather[at] + drift * at / (rounds * 4) + np.abs(rng.normal(0, 0.02, 40)))
            times[rng.random(40) < 0.05] *= 20
            batches.append(Batch(str(side), number, 0, np.zeros(40, np.int64), times.astype(np.int64)))
    return batches


@given(TIMES)
def test_summary_orders_percentiles_and_matches_samples(times):
    durations = np.array(times, np.int64)
    found = summarise(starts_of(durations), durations, drift_share=0.03)
    order = [found.min_ns, found.p10_ns, found.p50_ns, found.p90_ns, found.p99_ns, found.max_ns]
    assert order == sorted(order)
    assert (found.iterations, found.min_ns, found.max_ns) == (len(times), min(times), max(times))
    assert found.mean_ns == pytest.approx(np.mean(times))
    if found.median:
        assert min(times) <= found.median.low <= found.median.high <= max(times)


def test_summary_counts_outliers_but_not_clock_ticks():
    durations = np.random.default_rng(1).normal(50_000, 500, 2000).astype(np.int64)
    durations[[3, 700, 1999]] = 90_000
    found = summarise(starts_of(durations), durations, drift_share=0.03)
    assert (found.outliers, found.outlier_above_ns < 90_000) == (3, True)
    ticks = np.repeat([50_000, 51_000], [1500, 500])
    assert summarise(starts_of(ticks), ticks, drift_share=0.03).outliers == 0


@pytest.mark.ci
def test_median_interval_covers_median_despite_autocorrelation():
    """At 99 %, about 1 of 100 tries may miss. A method for independent samples would miss dozens here."""
    rng, missed = np.random.default_rng(2), 0
    for _ in range(100):
        durations = (50_000 * np.exp(alike(rng, 1000, share=0.05, memory=0.7))).astype(np.int64)
        found = compute_median_interval(durations)
        missed += not found.low <= 50_000 <= found.high
    assert missed <= 5


def test_median_interval_contains_median_of_alternating_times():
    durations = np.tile(np.array([40, 44], dtype=np.int64), 500)
    found = compute_median_interval(durations)
    assert found.low <= np.median(durations) <= found.high


@pytest.mark.parametrize("count", [1, 2, 12, 1000, 50_000])
def test_median_interval_narrows_with_more_samples(count):
    durations = np.random.default_rng(3).normal(50_000, 500, count).astype(np.int64)
    found = compute_median_interval(durations)
    if count <= 12:
        assert found is None
    else:
        assert 0 < found.high - found.low < 12 * 500 / math.sqrt(count)


def test_drift_marks_rising_times_but_not_autocorrelated_noise():
    rng, called = np.random.default_rng(4), 0
    for _ in range(100):
        durations = (50_000 * np.exp(alike(rng, 2000, share=0.05, memory=0.9))).astype(np.int64)
        called += measure_drift(starts_of(durations), durations, share=0.03).marked
    assert called <= 2
    rising = (50_000 * np.linspace(1, 1.1, 2000) * rng.normal(1, 0.02, 2000)).astype(np.int64)
    found = measure_drift(starts_of(rising), rising, share=0.03)
    assert found.marked
    assert found.change == pytest.approx(0.095, abs=0.01)
    assert not measure_drift(starts_of(rising), rising, share=0.2).marked


@pytest.mark.ci
def test_compare_reports_equal_speed_for_same_program():
    """In 200 tries, the level and the smallest effect together allow less than 1 % false differences."""
    rng = np.random.default_rng(5)
    told = [compare_rounds(round_log_ratios(machine(rng)), min_effect=0.03).verdict for _ in range(200)]
    assert told.count("no difference") >= 198


@pytest.mark.ci
def test_compare_interval_covers_true_ratio_at_stated_rate():
    rng = np.random.default_rng(6)
    found = [compare_rounds(round_log_ratios(machine(rng, ratio=1.1)), min_effect=0.03) for _ in range(200)]
    assert sum(one.interval.low <= 1.1 <= one.interval.high for one in found) >= 194


@pytest.mark.parametrize(("ratio", "verdict"), [(1.1, "slower"), (1 / 1.1, "faster")])
def test_compare_detects_ten_percent_on_noisy_machine(ratio, verdict):
    rng = np.random.default_rng(7)
    told = [compare_rounds(round_log_ratios(machine(rng, ratio=ratio)), min_effect=0.03).verdict for _ in range(50)]
    assert told.count(verdict) >= 49


def test_extra_rounds_do_not_create_false_differences():
    rng, told = np.random.default_rng(8), []
    for _ in range(200):
        logs = rng.standard_t(3, 60) * 0.05
        rounds = 20
        while not is_precise(compare_rounds(logs[:rounds], min_effect=0.03)) and rounds < 60:
            rounds += 10
        told.append(compare_rounds(logs[:rounds], min_effect=0.03).verdict)
    assert told.count("no difference") >= 198


@settings(max_examples=40)
@given(LOGS)
def test_compare_inverts_ratio_when_sides_swap(logs):
    ahead = compare_rounds(np.array(logs), min_effect=0.03)
    back = compare_rounds(-np.array(logs), min_effect=0.03)
    assert ahead.ratio * back.ratio == pytest.approx(1)
    assert back.interval.low * ahead.interval.high == pytest.approx(1, rel=0.05)


@settings(max_examples=40)
@given(LOGS, st.floats(0, 0.9))
def test_compare_ignores_changes_below_smallest_effect(logs, effect):
    found = compare_rounds(np.array(logs), min_effect=effect)
    if found.verdict != "no difference":
        assert abs(found.ratio - 1) > effect
        assert not found.interval.low <= 1 <= found.interval.high


@settings(max_examples=40)
@given(st.floats(0.5, 2), st.integers(1, 1000))
def test_compare_finds_steady_ratio_in_any_unit(ratio, unit):
    batches = [
        Batch(side, number, 0, np.zeros(3, np.int64), np.full(3, round(1e6 * unit * level), np.int64))
        for number in range(10)
        for side, level in (("A", 1.0), ("B", ratio), ("B", ratio), ("A", 1.0))
    ]
    assert compare_rounds(round_log_ratios(batches), min_effect=0).ratio == pytest.approx(ratio, rel=1e-5)


def test_compare_ignores_incomplete_and_too_few_rounds():
    rng = np.random.default_rng(9)
    batches = machine(rng, rounds=8)
    assert round_log_ratios(batches[:-1]).size == 7
    assert compare_rounds(round_log_ratios(batches[: 4 * (MIN_REPEATS - 1)]), min_effect=0.03) is None
    assert compare_rounds(round_log_ratios([]), min_effect=0.03) is None


@pytest.mark.ci
@pytest.mark.parametrize("freedom", [5, 6, 9, 19, 99])
def test_student_quantiles_match_scipy(freedom):
    stats = pytest.importorskip("scipy.stats")
    assert compute_student_quantile(0.995, freedom) == pytest.approx(stats.t.ppf(0.995, freedom), rel=0.01)

"""What the statistics of a bench claim, they claim at the rate they state."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hil.controller.analysis.bench.stats import (
    LEAST_REPEATS,
    Batch,
    compare_rounds,
    drift_of,
    is_precise,
    median_interval,
    round_log_ratios,
    student_quantile,
    summarise,
)

TIMES = st.lists(st.integers(1, 10**9), min_size=1, max_size=200)
LOGS = st.lists(st.floats(-1, 1), min_size=LEAST_REPEATS, max_size=30)


def starts_of(durations: np.ndarray) -> np.ndarray:
    return np.cumsum(durations) - durations


def alike(rng: np.random.Generator, count: int, *, share: float, memory: float) -> np.ndarray:
    """Autocorrelated noise of mean 0: each value keeps ``memory`` of the one before."""
    noise = np.empty(count)
    noise[0] = rng.normal()
    for number in range(1, count):
        noise[number] = memory * noise[number - 1] + math.sqrt(1 - memory**2) * rng.normal()
    return share * noise


def machine(rng: np.random.Generator, *, ratio: float = 1.0, rounds: int = 20) -> list[Batch]:
    """Two programs on a bad machine: noise with a memory, spikes, drift, and an own speed of each loaded process."""
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
def test_a_summary_is_in_order_and_holds_what_was_measured(times):
    durations = np.array(times, np.int64)
    found = summarise(starts_of(durations), durations, drift_share=0.03)
    order = [found.min_ns, found.p10_ns, found.p50_ns, found.p90_ns, found.p99_ns, found.max_ns]
    assert order == sorted(order)
    assert (found.iterations, found.min_ns, found.max_ns) == (len(times), min(times), max(times))
    assert found.mean_ns == pytest.approx(np.mean(times))
    if found.median:
        assert min(times) <= found.median.low <= found.median.high <= max(times)


def test_outliers_are_counted_and_a_coarse_clock_makes_none():
    durations = np.random.default_rng(1).normal(50_000, 500, 2000).astype(np.int64)
    durations[[3, 700, 1999]] = 90_000
    found = summarise(starts_of(durations), durations, drift_share=0.03)
    assert (found.outliers, found.outlier_above_ns < 90_000) == (3, True)
    ticks = np.repeat([50_000, 51_000], [1500, 500])
    assert summarise(starts_of(ticks), ticks, drift_share=0.03).outliers == 0


@pytest.mark.ci
def test_the_median_lies_in_its_interval_as_often_as_stated_though_samples_are_alike():
    """At 99 % 100 tries may miss about 1. Samples drawn one by one would miss dozens of these."""
    rng, missed = np.random.default_rng(2), 0
    for _ in range(100):
        durations = (50_000 * np.exp(alike(rng, 1000, share=0.05, memory=0.7))).astype(np.int64)
        found = median_interval(durations)
        missed += not found.low <= 50_000 <= found.high
    assert missed <= 5


@pytest.mark.parametrize("count", [1, 2, 12, 1000, 50_000])
def test_an_interval_gets_narrower_with_more_samples_or_is_not_told(count):
    durations = np.random.default_rng(3).normal(50_000, 500, count).astype(np.int64)
    found = median_interval(durations)
    if count <= 12:
        assert found is None
    else:
        assert 0 < found.high - found.low < 12 * 500 / math.sqrt(count)


def test_drift_is_found_and_noise_that_is_alike_is_not_called_drift():
    rng, called = np.random.default_rng(4), 0
    for _ in range(100):
        durations = (50_000 * np.exp(alike(rng, 2000, share=0.05, memory=0.9))).astype(np.int64)
        called += drift_of(starts_of(durations), durations, share=0.03).marked
    assert called <= 2
    rising = (50_000 * np.linspace(1, 1.1, 2000) * rng.normal(1, 0.02, 2000)).astype(np.int64)
    found = drift_of(starts_of(rising), rising, share=0.03)
    assert found.marked
    assert found.change == pytest.approx(0.095, abs=0.01)
    assert not drift_of(starts_of(rising), rising, share=0.2).marked


def test_a_program_beside_itself_is_no_difference_on_a_bad_machine():
    """200 tries: the level and the smallest effect together allow fewer than one in a hundred."""
    rng = np.random.default_rng(5)
    told = [compare_rounds(round_log_ratios(machine(rng)), min_effect=0.03).verdict for _ in range(200)]
    assert told.count("no difference") >= 198


def test_the_interval_alone_holds_the_true_ratio_as_often_as_stated():
    rng = np.random.default_rng(6)
    found = [compare_rounds(round_log_ratios(machine(rng, ratio=1.1)), min_effect=0.03) for _ in range(200)]
    assert sum(one.interval.low <= 1.1 <= one.interval.high for one in found) >= 194


@pytest.mark.parametrize(("ratio", "verdict"), [(1.1, "slower"), (1 / 1.1, "faster")])
def test_ten_percent_are_found_on_a_bad_machine(ratio, verdict):
    rng = np.random.default_rng(7)
    told = [compare_rounds(round_log_ratios(machine(rng, ratio=ratio)), min_effect=0.03).verdict for _ in range(50)]
    assert told.count(verdict) >= 49


def test_measuring_on_until_the_ratio_is_precise_does_not_make_differences():
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
def test_exchanging_a_and_b_turns_the_ratio_round(logs):
    ahead = compare_rounds(np.array(logs), min_effect=0.03)
    back = compare_rounds(-np.array(logs), min_effect=0.03)
    assert ahead.ratio * back.ratio == pytest.approx(1)
    assert back.interval.low * ahead.interval.high == pytest.approx(1, rel=0.05)


@settings(max_examples=40)
@given(LOGS, st.floats(0, 0.9))
def test_what_is_below_the_smallest_effect_is_never_told(logs, effect):
    found = compare_rounds(np.array(logs), min_effect=effect)
    if found.verdict != "no difference":
        assert abs(found.ratio - 1) > effect
        assert not found.interval.low <= 1 <= found.interval.high


@settings(max_examples=40)
@given(st.floats(0.5, 2), st.integers(1, 1000))
def test_a_steady_ratio_is_found_as_it_is_whatever_the_unit(ratio, unit):
    batches = [
        Batch(side, number, 0, np.zeros(3, np.int64), np.full(3, round(1e6 * unit * level), np.int64))
        for number in range(10)
        for side, level in (("A", 1.0), ("B", ratio), ("B", ratio), ("A", 1.0))
    ]
    assert compare_rounds(round_log_ratios(batches), min_effect=0).ratio == pytest.approx(ratio, rel=1e-5)


def test_a_round_that_was_cut_off_does_not_count_and_few_rounds_tell_nothing():
    rng = np.random.default_rng(9)
    batches = machine(rng, rounds=8)
    assert round_log_ratios(batches[:-1]).size == 7
    assert compare_rounds(round_log_ratios(batches[: 4 * (LEAST_REPEATS - 1)]), min_effect=0.03) is None
    assert compare_rounds(round_log_ratios([]), min_effect=0.03) is None


@pytest.mark.parametrize("freedom", [5, 6, 9, 19, 99])
def test_student_s_quantiles_are_those_of_scipy(freedom):
    stats = pytest.importorskip("scipy.stats")
    assert student_quantile(0.995, freedom) == pytest.approx(stats.t.ppf(0.995, freedom), rel=0.01)

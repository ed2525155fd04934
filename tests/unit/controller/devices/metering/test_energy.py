"""The energy of windows, against the true energy of the simulated meter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from hil.controller.devices.metering.energy import (
    EnergyRefused,
    EnergyWindow,
    add_tokens,
    evaluate_energy,
    select_gpio_windows,
)
from hil.controller.devices.metering.samples import PowerSamples
from hil.controller.devices.metering.simulated_meter import SimulatedMeter
from hil.controller.records.measurements.energy import EnergyMeasurement
from hil.core import clock
from hil.core.meter_config import SimulatedPower

S = 1_000_000_000
BEGIN = 5_000 * S
WINDOWS, INFERENCES, WINDOW_S, IDLE_S = 10, 100, 0.5, 1.0


@dataclass
class Bench:
    """A measurement with true host times, and the board's clock relative to the host's."""

    samples: PowerSamples
    fit: clock.ClockFit
    stamps: list[tuple[int, int]]  # windows on the board's clock
    idle: tuple[tuple[int, int], tuple[int, int]]

    def evaluate(self) -> EnergyMeasurement:
        windows = [
            EnergyWindow(((self.fit.to_host(start), self.fit.to_host(end)),), INFERENCES) for start, end in self.stamps
        ]
        return evaluate_energy(self.samples, windows, self.idle, meter="simulated", clock_error_ns=self.fit.error_ns)


@pytest.fixture
def measure(monkeypatch):
    def make(
        power: SimulatedPower, *, rate_hz: float = 100.0, offset_ns: int = 0, drift: float = 0.0, windows: int = WINDOWS
    ) -> Bench:
        random = np.random.default_rng(int(power.seed))
        now = BEGIN
        monkeypatch.setattr(clock, "_read", lambda: now)
        meter = SimulatedMeter(power, rate_hz)
        meter.start()
        pings, stamps = [], []

        def to_board(host_ns: int) -> int:
            return host_ns + offset_ns + round(drift * (host_ns - BEGIN))

        def ping() -> None:
            for _ in range(4):
                there, back = random.integers(50_000, 400_000, 2).tolist()
                pings.append(clock.Ping(now, to_board(now + there), now + there + back))

        now += round(random.uniform(0.1, 0.3) * S)
        ping()
        before = (now, now + round(IDLE_S * S))
        now = before[1]
        for _ in range(windows):
            now += round(random.uniform(0.01, 0.05) * S)
            warmup = round(0.1 * WINDOW_S * S)
            end = now + warmup + round(WINDOW_S * S)
            meter.observe_run(now, end)
            stamps.append((to_board(now + warmup), to_board(end)))
            now = end
            ping()
        now += round(0.2 * S)
        after = (now, now + round(IDLE_S * S))
        now = after[1]
        meter.stop()
        return Bench(meter.read(), clock.fit(pings, now), stamps, (before, after))

    return make


def true_joules(power: SimulatedPower) -> float:
    return (power.active_w - power.idle_w) * WINDOW_S / INFERENCES


@pytest.mark.parametrize("seed", range(20))
def test_energy_error_is_below_two_percent(measure, seed):
    power = SimulatedPower(idle_w=2.0, active_w=5.0, noise_w=0.3, seed=seed)
    found = measure(power, offset_ns=-(10**15) + seed, drift=(seed - 10) * 5e-5).evaluate()
    assert found.refused is None
    assert found.per_inference.joules == pytest.approx(true_joules(power), rel=0.02)
    assert found.idle_w == pytest.approx(2.0, rel=0.05)
    assert found.above_idle_w == pytest.approx(3.0, rel=0.02)
    assert 5.0 < found.peak_w < 7.0


def test_interval_contains_the_true_energy(measure):
    inside = 0
    for seed in range(60):
        power = SimulatedPower(idle_w=2.0, active_w=3.0, noise_w=0.2, seed=seed)
        interval = measure(power).evaluate().per_inference.interval
        inside += interval.low <= true_joules(power) <= interval.high
        assert interval.high - interval.low < 0.2 * true_joules(power)
    # The level is 99 %.
    assert inside >= 56


def test_energy_is_wrong_with_the_clock_of_the_board(measure):
    power = SimulatedPower(idle_w=2.0, active_w=5.0)
    bench = measure(power, offset_ns=3 * S // 10)
    wrong = replace(bench, fit=clock.ClockFit(0, 0.0, 0, 0)).evaluate()
    assert wrong.refused or wrong.per_inference.joules != pytest.approx(true_joules(power), rel=0.02)
    assert bench.evaluate().per_inference.joules == pytest.approx(true_joules(power), rel=0.02)


def test_linear_drift_of_idle_power_cancels(measure):
    power = SimulatedPower(idle_w=2.0, active_w=5.0, drift_w=0.015)
    found = measure(power).evaluate()
    assert found.refused is None
    assert found.per_inference.joules == pytest.approx(true_joules(power), rel=0.02)


def test_drifting_idle_power_is_refused(measure):
    found = measure(SimulatedPower(idle_w=2.0, active_w=5.0, drift_w=0.1, noise_w=0.05)).evaluate()
    assert found.refused == "idle drift"
    assert found.per_inference is None
    assert found.idle_after_w > found.idle_before_w + 0.5
    assert "the idle power changed from 2." in found.reason


def test_noise_is_not_drift(measure):
    for seed in range(20):
        found = measure(SimulatedPower(idle_w=2.0, active_w=2.2, noise_w=0.1, seed=seed)).evaluate()
        assert found.refused is None, found.reason


def test_constant_power_has_no_energy(measure):
    bench = measure(SimulatedPower())
    watts = np.full(bench.samples.times_ns.size, 3.5)
    found = replace(bench, samples=replace(bench.samples, watts=watts)).evaluate()
    assert found.refused is None, found.reason
    assert found.per_inference.joules == pytest.approx(0.0, abs=1e-12)


def test_slow_meter_is_refused(measure):
    found = measure(SimulatedPower(), rate_hz=30).evaluate()
    assert found.refused == "too few samples"
    assert "samples in a window of 0.5 s, expected at least 20" in found.reason
    assert found.samples < 20


@pytest.mark.parametrize(("lost", "refused"), [(0.005, None), (0.1, "lost samples")])
def test_lost_samples_are_refused(measure, lost, refused):
    found = measure(SimulatedPower(lost=lost), rate_hz=1000).evaluate()
    assert found.refused == refused


def test_gap_is_refused(measure):
    bench = measure(SimulatedPower())
    start = bench.fit.to_host(bench.stamps[3][0])
    kept = ~((bench.samples.times_ns > start + S // 10) & (bench.samples.times_ns < start + S // 5))
    samples = replace(bench.samples, times_ns=bench.samples.times_ns[kept], watts=bench.samples.watts[kept])
    found = replace(bench, samples=samples).evaluate()
    assert found.refused == "lost samples"
    assert found.reason.startswith("no samples for 1")


def test_inexact_clock_is_refused(measure):
    bench = measure(SimulatedPower())
    found = replace(bench, fit=replace(bench.fit, error_ns=10_000_000)).evaluate()
    assert found.refused == "clock not fitted"
    assert "to within 10 ms" in found.reason


def test_stopped_meter_is_refused(measure):
    bench = measure(SimulatedPower())
    found = replace(bench, samples=replace(bench.samples, problem="unplugged")).evaluate()
    assert (found.refused, found.reason) == ("meter failed", "unplugged")


def test_meter_that_stops_in_the_middle_is_refused(measure):
    bench = measure(SimulatedPower())
    kept = bench.samples.times_ns < bench.fit.to_host(bench.stamps[5][0])
    samples = replace(bench.samples, times_ns=bench.samples.times_ns[kept], watts=bench.samples.watts[kept])
    found = replace(bench, samples=samples).evaluate()
    assert found.refused == "meter failed"
    assert "s before the end of the measurement" in found.reason


def change_watts(samples: PowerSamples, change) -> PowerSamples:
    return replace(samples, watts=change(samples.watts))


def swap_times(samples: PowerSamples) -> PowerSamples:
    times = samples.times_ns.copy()
    times[[400, 401]] = times[[401, 400]]
    return replace(samples, times_ns=times)


def put_nan(watts: np.ndarray) -> np.ndarray:
    watts = watts.copy()
    watts[500] = np.nan
    return watts


@pytest.mark.parametrize(
    ("change", "refused", "reason"),
    [
        (lambda found: change_watts(found, put_nan), "invalid samples", "1 of"),
        (lambda found: change_watts(found, lambda watts: watts[:-1]), "invalid samples", "times for"),
        (lambda found: replace(found, invalid=50), "invalid samples", "50 of"),
        (lambda found: replace(found, invalid=1), None, ""),
        (swap_times, "times not increasing", "the time of 1 of"),
        (lambda found: replace(found, unordered=50), "times not increasing", "the time of 50 of"),
        (lambda found: replace(found, clock_problem="3 s ahead"), "clock not fitted", "3 s ahead"),
        (lambda found: change_watts(found, np.negative), "negative power", "the idle power is -2.000 W"),
        (lambda found: change_watts(found, lambda watts: 7 - watts), "negative energy", "below the idle power of 5 W"),
        (lambda found: change_watts(found, lambda watts: watts - 2.01), None, ""),
        (lambda found: PowerSamples(found.times_ns, joules=-np.cumsum(found.watts)), "invalid samples", "went back"),
        (lambda found: PowerSamples(), "meter failed", "the meter stopped"),
    ],
)
def test_unreliable_samples_are_refused(measure, change, refused, reason):
    bench = measure(SimulatedPower())
    found = replace(bench, samples=change(bench.samples)).evaluate()
    assert found.refused == refused
    assert reason in found.reason
    assert (found.per_inference is None) == (refused is not None)


def test_gap_of_an_energy_counter_is_accepted_inside_a_window(measure):
    bench = measure(SimulatedPower())
    start = bench.fit.to_host(bench.stamps[3][0])
    times = bench.samples.times_ns
    joules = np.cumsum(bench.samples.watts) / 100
    for shift, refused in ((S // 10, None), (-S // 20, "lost samples")):
        kept = ~((times > start + shift) & (times < start + shift + S // 10))
        found = replace(bench, samples=PowerSamples(times[kept], joules=joules[kept])).evaluate()
        assert found.refused == refused


def test_few_windows_have_no_interval(measure):
    found = measure(SimulatedPower(), windows=3).evaluate()
    assert found.refused is None
    assert found.per_inference.interval is None


def test_energy_counter_gives_the_same_energy(measure):
    bench = measure(SimulatedPower(idle_w=2.0, active_w=5.0))
    fine = np.arange(BEGIN, int(bench.samples.times_ns[-1]), 1_000_000)
    meter = SimulatedMeter(SimulatedPower(idle_w=2.0, active_w=5.0), 1000)
    for start, end in bench.stamps:
        meter.observe_run(bench.fit.to_host(start) - S // 20, bench.fit.to_host(end))
    joules = np.concatenate([[0.0], np.cumsum(meter.compute_watts(fine)[:-1]) * 1e-3])
    found = replace(bench, samples=PowerSamples(fine, joules=joules)).evaluate()
    assert found.per_inference.joules == pytest.approx(true_joules(SimulatedPower()), rel=0.02)
    assert found.peak_w == pytest.approx(5.0, rel=0.01)


def make_gpio(pulses: list[tuple[int, int]], end: int) -> PowerSamples:
    times = np.arange(0, end, 1_000_000)
    high = np.zeros(times.size, np.bool_)
    for start, stop in pulses:
        high |= (times >= start) & (times < stop)
    return PowerSamples(times, np.where(high, 5.0, 2.0), gpio=high)


def test_gpio_selects_the_timed_runs_of_a_call():
    pulses = [(at * S // 10, at * S // 10 + S // 20) for at in range(12, 18)]
    (window,) = select_gpio_windows(make_gpio(pulses, 3 * S), [(S, 2 * S)], iterations=4, warmup=2)
    assert window.units == 4
    assert window.length_s == pytest.approx(0.2, rel=0.01)
    assert window.ranges[0][0] == pytest.approx(pulses[2][0], abs=1_000_000)


def test_gpio_marks_a_whole_call():
    (window,) = select_gpio_windows(make_gpio([(S, 2 * S)], 3 * S), [(S // 2, 5 * S // 2)], iterations=4, warmup=1)
    assert (window.units, len(window.ranges)) == (5, 1)


def test_gpio_with_other_pulses_is_refused():
    with pytest.raises(EnergyRefused, match="high 2 times in a call, expected 1 or 5") as caught:
        select_gpio_windows(make_gpio([(0, S), (S + S // 2, 2 * S)], 3 * S), [(0, 3 * S)], iterations=4, warmup=1)
    assert caught.value.kind == "gpio mismatch"


def test_gpio_of_a_stopped_meter_reports_the_meter():
    samples = replace(make_gpio([(0, S)], 3 * S), problem="unplugged")
    with pytest.raises(EnergyRefused, match="unplugged") as caught:
        select_gpio_windows(samples, [(2 * S, 3 * S)], iterations=4, warmup=1)
    assert caught.value.kind == "meter failed"


def test_tokens_have_separate_energies():
    times = np.arange(0, 30 * S, 2_000_000)
    watts = np.full(times.size, 2.0)
    prompts, steps, whole = [], [], []
    for number in range(10):
        start = (3 + 2 * number) * S
        prompt, step = (start, start + S // 2), (start + S // 2, start + 3 * S // 2)
        watts[(times >= prompt[0]) & (times < prompt[1])] = 8.0
        watts[(times >= step[0]) & (times < step[1])] = 4.0
        prompts.append(EnergyWindow((prompt,), 6))
        steps.append(EnergyWindow((step,), 10))
        whole.append(EnergyWindow(((prompt[0], step[1]),), 1))
    samples, idle = PowerSamples(times, watts), ((0, 2 * S), (28 * S, 29 * S))
    found = add_tokens(evaluate_energy(samples, whole, idle, meter="file"), samples, prompts, steps, idle)
    assert found.per_inference.joules == pytest.approx(6.0 * 0.5 + 2.0, rel=0.02)
    assert found.per_prompt_token.joules == pytest.approx(0.5, rel=0.02)
    assert found.per_generated_token.joules == pytest.approx(0.2, rel=0.02)
    assert found.token_reason == ""


def test_short_prompt_has_no_energy():
    times = np.arange(0, 30 * S, 10_000_000)
    samples, idle = PowerSamples(times, np.full(times.size, 2.0)), ((0, 2 * S), (28 * S, 29 * S))
    whole = [EnergyWindow((((3 + at) * S, (4 + at) * S),), 1) for at in range(10)]
    prompts = [EnergyWindow((((3 + at) * S, (3 + at) * S + S // 10),), 4) for at in range(10)]
    found = add_tokens(evaluate_energy(samples, whole, idle, meter="file"), samples, prompts, [], idle)
    assert found.per_prompt_token is None
    assert found.token_reason == "prompt: 11 samples in a generation, expected at least 20"


@pytest.mark.parametrize(
    ("clock_error_ns", "gap_ns", "reason"),
    [
        (4_000_000, 0, ""),
        (6_000_000, 0, "prompt: the board's clock is known to within 6 ms, for 100 ms of a generation"),
        (0, 30_000_000, "prompt: no samples for 3"),
    ],
)
def test_parts_of_generations_have_own_limits(clock_error_ns, gap_ns, reason):
    # The limits of the whole windows of a second are not exceeded.
    times = np.arange(0, 30 * S, 1_000_000)
    times = times[(times < 3 * S + S // 20) | (times > 3 * S + S // 20 + gap_ns)]
    samples, idle = PowerSamples(times, np.full(times.size, 2.0)), ((0, 2 * S), (28 * S, 29 * S))
    whole = [EnergyWindow((((3 + at) * S, (4 + at) * S),), 1) for at in range(10)]
    prompts = [EnergyWindow((((3 + at) * S, (3 + at) * S + S // 10),), 4) for at in range(10)]
    found = evaluate_energy(samples, whole, idle, meter="file", clock_error_ns=clock_error_ns)
    assert found.refused is None, found.reason
    found = add_tokens(found, samples, prompts, [], idle, clock_error_ns=clock_error_ns)
    assert found.token_reason.startswith(reason)
    assert (found.per_prompt_token is None) == bool(reason)

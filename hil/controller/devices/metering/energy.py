"""Compute the energy of windows from power samples: pure functions of samples and times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hil.controller.devices.measuring.time_statistics import (
    LEVEL,
    MIN_REPEATS,
    Floats,
    compute_student_quantile,
)
from hil.controller.devices.metering.samples import PowerSamples
from hil.controller.records.base import Interval
from hil.controller.records.measurements.energy import EnergyMeasurement, EnergyRefusal, UnitEnergy

# Minimum number of samples in a window.
MIN_SAMPLES = 20
# Largest difference of the idle power before and after, relative to the power above idle.
MAX_IDLE_DRIFT = 0.05
# Largest part of a window without samples, longer than a few periods of the meter.
MAX_GAP = 0.05
_GAP_PERIODS = 4
# Largest share of samples that are lost, invalid or out of order.
MAX_LOST = 0.01
# Largest power below zero, relative to the power above idle: an offset of the meter.
MAX_NEGATIVE = 0.05
# Differences below this share of the idle power are errors of rounding.
_ROUNDING = 1e-6
# Largest error of the clock, relative to the length of a window.
MAX_CLOCK_ERROR = 0.01
# Largest error of the clock, relative to the prompt or to the steps of a generation.
MAX_PART_ERROR = 0.05
# A meter stopped if its samples end this long before the measurement, and this many periods.
_MIN_END_NS, _END_PERIODS = 200_000_000, 20
# Parts of an idle interval, whose powers give the standard error of the idle power.
_IDLE_PARTS = 10
# A difference is noise below this many standard errors.
_NOISE_ERRORS = 4.0

TimeRange = tuple[int, int]


class EnergyRefused(Exception):
    """The samples do not give a reliable energy."""

    def __init__(self, kind: EnergyRefusal, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


@dataclass(frozen=True)
class EnergyWindow:
    """Time ranges on the meter's clock in which the board computed a number of units (inferences or tokens)."""

    ranges: tuple[TimeRange, ...]
    units: int

    @property
    def length_s(self) -> float:
        """Total length in seconds."""
        return sum(end - start for start, end in self.ranges) / 1e9


@dataclass(frozen=True)
class IdlePower:
    """Idle power before and after the windows, and the standard error of its mean."""

    before_w: float
    after_w: float
    error_w: float

    @property
    def mean_w(self) -> float:
        """Mean of both powers. A linear drift cancels, because both intervals have the same weight."""
        return (self.before_w + self.after_w) / 2


def evaluate_energy(
    samples: PowerSamples,
    windows: Sequence[EnergyWindow],
    idle: tuple[TimeRange, TimeRange],
    *,
    meter: str,
    clock_error_ns: float = 0.0,
) -> EnergyMeasurement:
    """Return the energy of an inference above idle, or why it is refused.

    Args:
        windows: windows with at least one range, on the clock of the samples.
        idle: time ranges before and after the windows in which no program ran.
        meter: kind of the meter.
        clock_error_ns: largest error of the windows' times.
    """
    found = EnergyMeasurement(meter=meter, windows=len(windows), inferences=sum(one.units for one in windows))
    try:
        _check_stream(samples)
        found = found.replace(samples=min((count_samples(samples, one) for one in windows), default=0))
        _check_end(samples, max(end for _, end in (*idle, *(part for one in windows for part in one.ranges))))
        _check_samples(samples, [*windows, *(EnergyWindow((one,), 1) for one in idle)], clock_error_ns)
        power = measure_idle(samples, *idle)
        found = found.replace(idle_w=power.mean_w, idle_before_w=power.before_w, idle_after_w=power.after_w)
        joules = sum(_compute_joules(samples, one) for one in windows)
        average_w = joules / sum(one.length_s for one in windows)
        above_w = average_w - power.mean_w
        peak_w = max(samples.find_peak(*part) for one in windows for part in one.ranges)
        found = found.replace(average_w=average_w, above_idle_w=above_w, peak_w=peak_w)
        _check_sign(power, average_w)
        _check_drift(power, above_w)
        return found.replace(per_inference=compute_unit_energy(samples, windows, power))
    except EnergyRefused as error:
        return found.replace(refused=error.kind, reason=error.reason)


def add_tokens(
    found: EnergyMeasurement,
    samples: PowerSamples,
    prompts: Sequence[EnergyWindow],
    steps: Sequence[EnergyWindow],
    idle: tuple[TimeRange, TimeRange],
    *,
    clock_error_ns: float = 0.0,
) -> EnergyMeasurement:
    """Add the energy of tokens to the measurement of whole generations.

    Args:
        prompts: the calls of the prompt in each window, with the number of prompt tokens.
        steps: the calls of the steps in each window, with the number of generated tokens; may be empty.
        clock_error_ns: largest error of the windows' times.
    """
    if found.refused is not None:
        return found
    power = measure_idle(samples, *idle)
    energies: dict[str, UnitEnergy] = {}
    reasons = []
    for name, title, windows in (
        ("per_prompt_token", "prompt", prompts),
        ("per_generated_token", "steps", steps),
    ):
        if not windows:
            continue
        if reason := _refuse_tokens(samples, [part for one in windows for part in one.ranges], clock_error_ns):
            reasons.append(f"{title}: {reason}")
        else:
            energies[name] = compute_unit_energy(samples, windows, power)
    return found.replace(**energies, token_reason="; ".join(reasons))


def _refuse_tokens(samples: PowerSamples, parts: Sequence[TimeRange], clock_error_ns: float) -> str:
    """Return why the samples give no reliable energy of parts of generations, or ""."""
    fewest = min(_count_range(samples, part) for part in parts)
    if fewest < MIN_SAMPLES:
        return f"{fewest} samples in a generation, expected at least {MIN_SAMPLES}"
    shortest_ns = min(end - start for start, end in parts)
    # A part is shorter than the window, for which the error of the clock was checked.
    if clock_error_ns > MAX_PART_ERROR * shortest_ns:
        return (
            f"the board's clock is known to within {clock_error_ns / 1e6:.3g} ms, for {shortest_ns / 1e6:.3g} ms of a "
            "generation"
        )
    period_ns = samples.period_ns
    for start, end in parts:
        gap = samples.find_gap(start, end)
        if gap > _GAP_PERIODS * period_ns and gap > MAX_GAP * (end - start):
            return f"no samples for {gap / 1e6:.3g} ms of {(end - start) / 1e6:.3g} ms of a generation"
    return ""


def compute_unit_energy(samples: PowerSamples, windows: Sequence[EnergyWindow], idle: IdlePower) -> UnitEnergy:
    """Return the mean energy of a unit above idle, with its interval.

    The interval combines the spread of the windows (Student) with the standard error of the idle power.
    """
    lengths = np.array([one.length_s for one in windows])
    units = np.array([one.units for one in windows], np.float64)
    joules = np.array([_compute_joules(samples, one) for one in windows]) - idle.mean_w * lengths
    mean = float(joules.sum() / units.sum())
    count = len(windows)
    if count < MIN_REPEATS:
        return UnitEnergy(joules=mean, interval=None)
    spread = float(np.std(joules / units, ddof=1)) / math.sqrt(count)
    of_idle = idle.error_w * float(lengths.sum() / units.sum())
    half = float(compute_student_quantile((1 + LEVEL) / 2, count - 1)) * math.hypot(spread, of_idle)
    return UnitEnergy(joules=mean, interval=Interval(low=mean - half, high=mean + half, level=LEVEL))


def measure_idle(samples: PowerSamples, before: TimeRange, after: TimeRange) -> IdlePower:
    """Return the idle power of two time ranges, with at least :data:`MIN_SAMPLES` samples each."""
    powers = [_split_power(samples, part) for part in (before, after)]
    errors = [float(np.std(one, ddof=1)) / math.sqrt(one.size) if one.size > 1 else 0.0 for one in powers]
    means = [samples.compute_power(*part) for part in (before, after)]
    return IdlePower(means[0], means[1], math.hypot(*errors) / 2)


def count_samples(samples: PowerSamples, window: EnergyWindow) -> int:
    """Return the number of samples in a window."""
    return sum(_count_range(samples, part) for part in window.ranges)


def select_gpio_windows(
    samples: PowerSamples, calls: Sequence[TimeRange], iterations: int, warmup: int
) -> list[EnergyWindow]:
    """Return the windows in which the meter's GPIO was high, one window for every call.

    Args:
        calls: host times of the calls, from sending to the response.
        iterations, warmup: runs in each call. The GPIO marks each run, or the whole call.

    Raises:
        EnergyRefused: the samples are invalid, or the number of pulses in a call is neither the number of runs nor 1.
    """
    _check_stream(samples)
    if not samples.gpio.size:
        raise EnergyRefused("gpio mismatch", "the meter has no column gpio")
    found = []
    # A pulse belongs to the call that contains its middle: the times of the meter may be late by its latency.
    every = _find_pulses(samples)
    middles = np.array([(start + end) // 2 for start, end in every], np.int64)
    for start, end in calls:
        pulses = every[np.searchsorted(middles, start) : np.searchsorted(middles, end, "right")]
        if len(pulses) == warmup + iterations:
            found.append(EnergyWindow(tuple(pulses[warmup:]), iterations))
        elif len(pulses) == 1:
            found.append(EnergyWindow(tuple(pulses), warmup + iterations))
        else:
            expected = f"expected 1 or {warmup + iterations}, one for each run"
            raise EnergyRefused("gpio mismatch", f"the gpio was high {len(pulses)} times in a call, {expected}")
    return found


def _find_pulses(samples: PowerSamples) -> list[TimeRange]:
    """Return the time ranges in which the GPIO is high. An edge is midway between two samples."""
    times = samples.times_ns
    levels = np.concatenate([[False], samples.gpio, [False]]).astype(np.int8)
    edges = np.diff(levels)
    middles = np.concatenate([times[:1], (times[1:] + times[:-1]) // 2, times[-1:]])
    starts, ends = middles[edges == 1], middles[edges == -1]
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def _check_stream(samples: PowerSamples) -> None:
    """Refuse samples that are not a valid series. A meter of a package may return anything."""
    if samples.problem:
        raise EnergyRefused("meter failed", samples.problem)
    if samples.clock_problem:
        raise EnergyRefused("clock not fitted", samples.clock_problem)
    values = samples.joules if samples.joules.size else samples.watts
    if values.shape != samples.times_ns.shape or samples.gpio.size not in (0, values.size):
        raise EnergyRefused("invalid samples", f"{samples.times_ns.size} times for {values.size} values of the meter")
    wrong = samples.invalid + int((~np.isfinite(values)).sum())
    total = samples.times_ns.size + samples.invalid + samples.unordered
    if wrong > MAX_LOST * total or wrong > samples.invalid:
        raise EnergyRefused("invalid samples", f"{wrong} of {total} samples are not numbers")
    back = int((np.diff(samples.times_ns) <= 0).sum())
    if samples.unordered > MAX_LOST * total or back:
        raise EnergyRefused(
            "times not increasing",
            f"the time of {samples.unordered + back} of {total} samples is not after the sample before",
        )
    if samples.joules.size and bool((np.diff(samples.joules) < 0).any()):
        raise EnergyRefused("invalid samples", "the energy counter went back")


def _check_end(samples: PowerSamples, end_ns: int) -> None:
    """Refuse samples that end before the measurement."""
    last = int(samples.times_ns[-1]) if samples.times_ns.size else 0
    if end_ns - last > max(_END_PERIODS * samples.period_ns, _MIN_END_NS):
        raise EnergyRefused(
            "meter failed", f"the meter stopped {(end_ns - last) / 1e9:.3g} s before the end of the measurement"
        )


def _check_samples(samples: PowerSamples, windows: Sequence[EnergyWindow], clock_error_ns: float) -> None:
    for window in windows:
        count = count_samples(samples, window)
        if count < MIN_SAMPLES or any(_count_range(samples, part) < 2 for part in window.ranges):
            raise EnergyRefused(
                "too few samples",
                f"{count} samples in a window of {window.length_s:.3g} s, expected at least {MIN_SAMPLES}",
            )
        length_ns = window.length_s * 1e9
        if clock_error_ns > MAX_CLOCK_ERROR * length_ns:
            raise EnergyRefused(
                "clock not fitted",
                f"the board's clock is known to within {clock_error_ns / 1e6:.3g} ms, "
                f"for windows of {length_ns / 1e6:.3g} ms",
            )
        gap = max(samples.find_gap(*part) for part in window.ranges)
        if gap > _GAP_PERIODS * samples.period_ns and gap > MAX_GAP * length_ns:
            raise EnergyRefused(
                "lost samples", f"no samples for {gap / 1e6:.3g} ms of a window of {length_ns / 1e6:.3g} ms"
            )
    if samples.lost > MAX_LOST * (samples.lost + samples.times_ns.size):
        raise EnergyRefused(
            "lost samples", f"the meter lost {samples.lost} of {samples.lost + samples.times_ns.size} samples"
        )


def _check_sign(idle: IdlePower, average_w: float) -> None:
    above_w = average_w - idle.mean_w
    for title, power_w in (("idle", idle.mean_w), ("average", average_w)):
        if power_w < -MAX_NEGATIVE * abs(above_w) and power_w < -_NOISE_ERRORS * idle.error_w:
            raise EnergyRefused(
                "negative power", f"the {title} power is {power_w:.3f} W: check the direction of the current"
            )
    if above_w < -_ROUNDING * abs(idle.mean_w):
        raise EnergyRefused(
            "negative energy",
            f"the average power of {average_w:.4g} W is below the idle power of {idle.mean_w:.4g} W: "
            "check that the meter measures this board, and that the board is idle before the measurement",
        )


def _check_drift(idle: IdlePower, above_w: float) -> None:
    change = abs(idle.after_w - idle.before_w)
    noise = max(_NOISE_ERRORS * 2 * idle.error_w, _ROUNDING * abs(idle.mean_w))
    if change > MAX_IDLE_DRIFT * abs(above_w) and change > noise:
        raise EnergyRefused(
            "idle drift",
            f"the idle power changed from {idle.before_w:.3f} to {idle.after_w:.3f} W, for {above_w:.3f} W above idle",
        )


def _compute_joules(samples: PowerSamples, window: EnergyWindow) -> float:
    return sum(samples.compute_energy(*part) for part in window.ranges)


def _count_range(samples: PowerSamples, part: TimeRange) -> int:
    inside = samples.find(*part)
    return int(inside.stop - inside.start)


def _split_power(samples: PowerSamples, part: TimeRange) -> Floats:
    """Return the mean power of equal parts of a time range."""
    edges = np.linspace(part[0], part[1], _IDLE_PARTS + 1).astype(np.int64).tolist()
    found = []
    for start, end in itertools.pairwise(edges):
        if _count_range(samples, (start, end)) >= 2:
            found.append(samples.compute_power(start, end))
    return np.array(found, np.float64)

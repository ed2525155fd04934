"""Grade measurements: pure functions of conditions and times. docs/conditions.md lists the limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from hil.controller.records.measurements.bench import BenchTimes
from hil.controller.records.measurements.conditions import ConditionReading, Conditions, Grade, MeasurementGrade

# With fewer iterations, the median is unreliable.
MIN_ITERATIONS = 10
# 99 % interval of the median: half its width, relative to the median.
INTERVAL_SHARE = 0.02
# Distance of the 10th and 90th percentile, relative to the median.
SPREAD_SHARE = 0.10
OUTLIER_SHARE = 0.05
# Cores that other programs keep busy. Background services of an idle system need less.
LOAD_CORES = 0.5
# Share of all cores that are busy. Above this share, other programs take time from the measured program.
BUSY_SHARE = 0.95
# Time stalled on memory, in percent.
PRESSURE_NOISY, PRESSURE_BAD = 1.0, 10.0
# Range of a core's frequency during the measurement, relative to the median.
FREQUENCY_SHARE = 0.05
WARMING_DEGC = 10.0


def grade_measurement(
    conditions: Conditions | None,
    times: BenchTimes | None,
    *,
    clock: Literal["board", "host"] = "board",
    in_turns: bool = False,
    has_cold: bool = False,
) -> MeasurementGrade:
    """Grade a measurement A (steady), B (noisy) or F (not comparable), with the reasons for B or F.

    Args:
        conditions: the board's conditions; None if unknown.
        times: the measured times; None to judge only the conditions.
        clock: the clock of the times. Times by the host's clock include a process start.
        in_turns: whether two programs were measured in turns, to be compared with each other. Their ratio is computed
            from undisturbed times. So other programs and the host's clock make the ratio noisy, but not wrong.
        has_cold: whether a cold iteration was measured that is not in the times. It counts as an iteration.
    """
    disturbed: Grade = "B" if in_turns else "F"
    found = [] if times is None else [*_judge_times(times, times.iterations + has_cold)]
    if clock == "host":
        found.append((disturbed, "measured with the host's clock, with a process start in each iteration"))
    if conditions is not None:
        found += [*_judge_state(conditions), *_judge_others(conditions, disturbed)]
    worst: Grade = max((grade for grade, _ in found), default="A")
    return MeasurementGrade(grade=worst, reasons=[reason for grade, reason in found if grade == worst])


def list_disturbances(conditions: Conditions) -> list[str]:
    """Return the changes of a board that make all times of a measurement not comparable (grade F)."""
    return [reason for grade, reason in _judge_state(conditions) if grade == "F"]


_Findings = Iterator[tuple[Grade, str]]


def _judge_times(times: BenchTimes, measured: int) -> _Findings:
    middle = max(times.p50_ns, 1.0)
    if measured < MIN_ITERATIONS:
        yield "F", f"only {measured} iterations, expected at least {MIN_ITERATIONS}"
    elif times.median is None:
        yield "B", f"only {measured} iterations: the interval of the median is unknown"
    elif (half := (times.median.high - times.median.low) / 2 / middle) > INTERVAL_SHARE:
        yield "B", f"the median is known only to within {half:.1%}"
    if (spread := (times.p90_ns - times.p10_ns) / middle) > SPREAD_SHARE:
        yield "B", f"p10 and p90 are {spread:.0%} apart"
    if (share := times.outliers / times.iterations) > OUTLIER_SHARE:
        yield "B", f"{share:.0%} of the iterations are outliers"
    if times.drift and times.drift.marked:
        yield "B", f"the times drifted by {times.drift.change:+.1%}"


def _judge_state(conditions: Conditions) -> _Findings:
    for event in conditions.events:
        yield "F", event
    for reading in conditions.readings:
        yield from _judge_reading(reading)


def _judge_reading(reading: ConditionReading) -> _Findings:
    name, before, after = reading.name, reading.before, reading.after
    if isinstance(before, float) and isinstance(after, float):
        # Skip a fall, which is already an event.
        if name.endswith(" highest frequency") and after > before:
            yield "F", f"the {name} rose from {before:.0f} to {after:.0f} MHz"
        if reading.unit == "degC" and after - before > WARMING_DEGC:
            yield "B", f"{name} rose from {before:.0f} to {after:.0f} C"
    if reading.unit == "MHz" and reading.median and reading.low is not None and reading.high is not None:
        spread = (reading.high - reading.low) / reading.median
        if spread > FREQUENCY_SHARE:
            yield "B", f"the {name} varied from {reading.low:.0f} to {reading.high:.0f} MHz"


def _judge_others(conditions: Conditions, disturbed: Grade) -> _Findings:
    if (stalled := conditions.memory_pressure or 0.0) > PRESSURE_NOISY:
        grade = disturbed if stalled > PRESSURE_BAD else "B"
        yield grade, f"programs on the board stalled on memory for {stalled:.0f} % of the time"
    other, busy, cores = conditions.other_load, conditions.busy_cores, conditions.cores
    if other is None or busy is None or not cores or other <= LOAD_CORES:
        return
    if busy > BUSY_SHARE * cores:
        yield disturbed, f"other programs kept {other:.1f} of {cores} cores busy, and no core was free"
    else:
        yield "B", f"other programs kept {other:.1f} of {cores} cores busy"

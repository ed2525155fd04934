"""Grades of measurements."""

from __future__ import annotations

from typing import Any

import pytest
from support.times import steady_times

from hil.controller.devices.measuring.grading import grade_measurement
from hil.controller.records.base import Interval
from hil.controller.records.measurements.bench import Drift
from hil.controller.records.measurements.conditions import ConditionReading, Conditions


def make_conditions(*readings: ConditionReading, **values: Any) -> Conditions:
    quiet: dict[str, Any] = {"events": [], "samples": 8, "cores": 4, "busy_cores": 1.1, "other_load": 0.1}
    return Conditions(readings=list(readings), **{**quiet, **values})


def reading(name: str, unit: str, *values: float | None) -> ConditionReading:
    return ConditionReading(
        name=name,
        unit=unit,
        **{at: None if value is None else float(value) for at, value in zip(TIMES, values, strict=True)},
    )


TIMES = ("before", "low", "median", "high", "after")
CLOCK = "cpu0 highest frequency"


@pytest.mark.parametrize(
    ("conditions", "grade", "reason"),
    [
        (make_conditions(), "A", ""),
        (make_conditions(other_load=0.6, busy_cores=1.6), "B", "other programs kept 0.6 of 4 cores busy"),
        (make_conditions(other_load=2.9, busy_cores=3.9), "F", "no core was free"),
        (make_conditions(other_load=0.1, busy_cores=4.0), "A", ""),
        (make_conditions(memory_pressure=3.0), "B", "stalled on memory for 3 %"),
        (make_conditions(memory_pressure=40.0), "F", "stalled on memory for 40 %"),
        (make_conditions(events=["the board throttled: 2 CPU throttle events"]), "F", "2 CPU throttle events"),
        (make_conditions(reading(CLOCK, "MHz", 1200, None, None, None, 1800)), "F", "rose from 1200 to 1800 MHz"),
        (make_conditions(reading("cpu0 frequency", "MHz", 0, 1000, 1800, 1800, 0)), "B", "varied from 1000 to 1800"),
        (make_conditions(reading("zone (cpu)", "degC", 40, None, None, None, 55)), "B", "from 40 to 55 C"),
        (make_conditions(cores=None, busy_cores=None, other_load=None, missing="no agent"), "A", ""),
        (None, "A", ""),
    ],
)
def test_grade_depends_on_conditions(conditions, grade, reason):
    found = grade_measurement(conditions, steady_times())
    assert (found.grade, len(found.reasons)) == (grade, int(bool(reason)))
    assert reason in "".join(found.reasons)


@pytest.mark.parametrize(
    ("times", "grade", "reason"),
    [
        ({"iterations": 9, "median": None, "drift": None, "outliers": 0}, "F", "only 9 iterations"),
        ({"iterations": 12, "median": None, "drift": None, "outliers": 0}, "B", "only 12 iterations"),
        ({"median": Interval(low=900.0, high=1100.0, level=0.99)}, "B", "within 10.0%"),
        ({"p10_ns": 900.0, "p90_ns": 1100.0}, "B", "20% apart"),
        ({"outliers": 60}, "B", "6% of the iterations"),
        ({"drift": Drift(change=-0.08, p_value=0.0, marked=True)}, "B", "drifted by -8.0%"),
    ],
)
def test_grade_depends_on_times(times, grade, reason):
    found = grade_measurement(make_conditions(), steady_times(**times))
    assert (found.grade, [reason in one for one in found.reasons]) == (grade, [True])


def test_grade_lists_only_reasons_of_worst_grade():
    throttled = make_conditions(events=["the governor changed"])
    assert grade_measurement(throttled, steady_times(outliers=60)).reasons == ["the governor changed"]


def test_grade_in_turns_tolerates_other_programs_but_not_throttling():
    loaded = make_conditions(other_load=2.9, busy_cores=3.9, memory_pressure=40.0)
    assert grade_measurement(loaded, steady_times(), clock="host", in_turns=True).grade == "B"
    throttled = loaded.replace(events=["the board throttled: 1 CPU throttle events"])
    assert grade_measurement(throttled, steady_times(), in_turns=True).grade == "F"

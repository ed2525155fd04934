"""Conditions of a board during a measurement."""

from __future__ import annotations

import pytest

from hil.controller.devices.measuring.conditions import summarise_conditions
from hil.core.timeline import Sample

SECOND = 1_000_000_000
BEFORE = {"readings": [{"name": "zone (cpu)", "value": 40.5, "unit": "degC"}, {"name": "cpu0 governor", "text": "a"}]}
AFTER = {"readings": [{"name": "zone (cpu)", "value": 50.5, "unit": "degC"}, {"name": "cpu0 governor", "text": "b"}]}


def look(at_s: float, busy: float, **others: float) -> list[Sample]:
    at = int(at_s * SECOND)
    cores = [Sample(at, f"cpu{core} busy", busy, "%") for core in range(2)]
    return [*cores, *(Sample(at, name.replace("_", " "), value, "MHz") for name, value in others.items())]


def test_summarise_conditions_merges_readings_of_all_times():
    samples = [one for at, clock in enumerate((900, 1000, 1800)) for one in look(at, 50, cpu0_frequency=clock)]
    found = summarise_conditions(BEFORE, AFTER, samples, [])
    zone, governor, clock = found.readings
    assert (zone.before, zone.after, zone.unit, zone.low) == (40.5, 50.5, "degC", None)
    assert (governor.before, governor.after) == ("a", "b")
    assert (clock.low, clock.median, clock.high, clock.before) == (900, 1000, 1800, None)
    assert (found.samples, found.cores, found.busy_cores) == (3, 2, 1.0)
    assert found.other_load is None  # the program's own load is unknown


@pytest.mark.parametrize(("own", "other"), [(0.25, 0.75), (1.5, 0.0)])
def test_summarise_conditions_subtracts_own_load_within_window(own, other):
    samples = [*look(0, 100), *look(1.1, 100), *look(2, 50), *look(3, 50), *look(4, 100)]
    found = summarise_conditions({}, {}, samples, [], window_ns=(SECOND, 3 * SECOND), own_cores=own)
    assert (found.samples, found.busy_cores, found.other_load) == (2, 1.0, other)


def test_summarise_conditions_averages_memory_pressure():
    samples = [one for at, value in enumerate((1.0, 3.0)) for one in look(at, 0, memory_pressure=value)]
    found = summarise_conditions({}, {}, samples, [])
    assert (found.memory_pressure, found.readings) == (2.0, [])


def test_summarise_conditions_keeps_last_of_repeated_events():
    events = ["throttled: 1 events", "the governor changed", "throttled: 12 events"]
    found = summarise_conditions({}, {}, [], events, missing="no agent")
    assert found.events == ["throttled: 12 events", "the governor changed"]
    assert (found.samples, found.cores, found.missing) == (0, None, "no agent")

"""The power in a profile."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from hil.controller.devices.metering.power_watch import PowerWatch
from hil.core.board_config import BoardConfig, Connection, Simulator
from hil.core.clock import ClockFit, get_time_ns
from hil.core.meter_config import MeterConfig

OFFSET_NS = 7_000_000_000_000


def make_board(host_meter="", **keys) -> SimpleNamespace:
    config = BoardConfig("sim", "sim", simulator=Simulator(), connection=Connection(host_meter=host_meter))
    return SimpleNamespace(name="sim", meter=MeterConfig(**keys), config=config)


def test_power_has_times_of_the_board():
    begun = get_time_ns()
    with PowerWatch(make_board(kind="simulated", rate_hz=1000)) as watch:
        time.sleep(0.02)
        watch.observe_run((begun, get_time_ns()))
    samples = watch.list_samples(ClockFit(OFFSET_NS, 0.0, begun, 0))
    assert {(one.name, one.unit, one.value) for one in samples[:3]} == {("power", "W", 5.0)}
    assert begun <= samples[0].at_ns - OFFSET_NS <= get_time_ns()
    assert watch.problem == ""


def test_power_needs_a_fitted_clock():
    with PowerWatch(make_board(kind="simulated")) as watch:
        pass
    assert watch.list_samples(None) == []


@pytest.mark.parametrize("keys", [{}, {"kind": "hwmon", "path": "/sys/none"}])
def test_missing_meter_never_fails_the_run(keys):
    with PowerWatch(make_board(**keys)) as watch:
        watch.observe_run((0, 1))
    assert watch.list_samples(ClockFit(0, 0.0, 0, 0)) == []
    assert watch.problem[:10] == ("no power: " if keys else "")


def test_trace_of_leased_board_explains_missing_power():
    with PowerWatch(make_board(host_meter="command")) as watch:
        pass
    assert watch.problem.startswith("no power: the command meter of board sim is on the board's host")

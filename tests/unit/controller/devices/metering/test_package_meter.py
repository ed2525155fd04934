"""Meters of packages, whose errors never change the outcome of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hil.controller.devices.metering import meter_factory
from hil.controller.devices.metering.power_watch import PowerWatch
from hil.controller.devices.metering.samples import PowerSamples
from hil.controller.pipeline.energy import measure_energy
from hil.core.board_config import BoardConfig
from hil.core.clock import ClockFit
from hil.core.meter_config import MeterConfig


class Given:
    """Meter with given samples or errors."""

    def __init__(self, samples: Any = None, *, fails: str = "") -> None:
        self.samples = PowerSamples([10, 20, 30], [1.0, 2.0, 3.0]) if samples is None else samples
        self.fails = fails

    def start(self) -> None:
        self._do("start")

    def read(self) -> Any:
        self._do("read")
        return self.samples

    def stop(self) -> None:
        self._do("stop")

    def _do(self, what: str) -> None:
        if self.fails == what:
            raise RuntimeError("unplugged")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes the power watch of a board with a meter of a package."""

    def make(meter: Given) -> PowerWatch:
        point = SimpleNamespace(name="scope", value="pkg:Meter", dist=None, group="hil.meters")
        monkeypatch.setattr(meter_factory, "list_entry_points", lambda group: [point])
        monkeypatch.setattr(meter_factory, "describe_entry_point", lambda point: "the meter scope")
        monkeypatch.setattr(meter_factory, "load", lambda point: lambda options: meter)
        return PowerWatch(make_board())

    return make


def make_board() -> Any:
    return SimpleNamespace(meter=MeterConfig(kind="scope", start_s=0.1), config=BoardConfig("kit", "sim"))


def test_samples_may_be_lists(watch):
    with watch(Given()) as found:
        pass
    samples = found.list_samples(ClockFit(5, 0.0, 0, 0))
    assert [(one.at_ns, one.value) for one in samples] == [(15, 1.0), (25, 2.0), (35, 3.0)]
    assert found.problem == ""


@pytest.mark.parametrize("step", ["start", "read", "stop"])
def test_error_of_a_package_never_fails_the_profile(watch, step):
    with watch(Given(fails=step)) as found:
        pass
    found.list_samples(ClockFit(0, 0.0, 0, 0))
    assert f"{step}() of the meter scope failed: RuntimeError: unplugged" in found.problem


@pytest.mark.parametrize(
    "samples",
    [[1.0], PowerSamples(["x"], [1.0]), PowerSamples([[1]], [[1.0]]), PowerSamples([2**70], [1.0])],
)
def test_wrong_samples_never_fail_the_profile(watch, samples):
    with watch(Given(samples)) as found:
        pass
    assert found.list_samples(ClockFit(0, 0.0, 0, 0)) == []
    assert "read() of the meter scope failed" in found.problem


@pytest.mark.parametrize("values", [{"watts": [1.0]}, {"joules": [1.0, 2.0]}])
def test_different_numbers_of_times_and_values_give_no_samples(watch, values):
    with watch(Given(PowerSamples([1, 2, 3], **values))) as found:
        pass
    assert found.list_samples(ClockFit(0, 0.0, 0, 0)) == []


@pytest.mark.parametrize("step", ["start", "read"])
def test_error_of_a_package_refuses_the_energy(watch, step):
    watch(Given(fails=step))
    found = measure_energy(
        make_board(), lambda *_: pytest.fail("ran"), each_ns=1e6, timeout_s=1.0, report=lambda share: None
    )
    assert found.refused == "meter failed"
    assert "unplugged" in found.reason

"""Repeating a stored bench."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.times import steady_times

from hil.controller.analysis.bench import rerun
from hil.controller.analysis.bench.stats import compare_medians
from hil.controller.records.measurements.conditions import ConditionReading, Conditions
from hil.controller.records.run import StoredProvenance


def make_conditions(temperature: float, clock: float, other_load: float, **more: Any) -> Conditions:
    readings = [
        ConditionReading(name="zone (cpu)", unit="degC", before=temperature, after=temperature),
        ConditionReading(name="cpu0 frequency", unit="MHz", low=clock, median=clock, high=clock),
    ]
    return Conditions(readings=readings, events=[], cores=4, busy_cores=1.0, other_load=other_load, **more)


@pytest.mark.parametrize(
    ("b", "verdict", "interval"),
    [
        (steady_times(1000.0), "no difference", (0.9986, 1.0014)),
        (steady_times(1100.0), "slower", (1.0985, 1.1015)),
        (steady_times(900.0), "faster", (0.8987, 0.9013)),
    ],
)
def test_compare_medians_combines_intervals(b, verdict, interval):
    found = compare_medians(steady_times(1000.0), b, min_effect=0.03)
    assert found is not None
    assert (found.verdict, found.ratio) == (verdict, b.p50_ns / 1000)
    assert (found.interval.low, found.interval.high) == pytest.approx(interval, abs=1e-4)


def test_compare_medians_needs_both_intervals():
    unknown = steady_times(1000.0).replace(median=None)
    assert compare_medians(unknown, steady_times(900.0), min_effect=0.03) is None


def test_compare_conditions_lists_changes_beyond_limits():
    cool, warm = make_conditions(40, 1800, 0.1), make_conditions(60, 1700, 0.9)
    found = {one.name: (one.stored, one.now) for one in rerun._compare_conditions(cool, warm)}
    assert found == {
        "zone (cpu)": ("40 degC", "60 degC"),
        "cpu0 frequency": ("1800 MHz", "1700 MHz"),
        "other load": ("0.1 cores", "0.9 cores"),
    }
    assert not list(rerun._compare_conditions(cool, make_conditions(45, 1790, 0.3)))
    assert not list(rerun._compare_conditions(None, warm))


def test_compare_provenance_lists_versions_and_governors():
    old = StoredProvenance(
        runtime_version="3.12",
        machine={"kernel": "6.1", "cpu_features": ["a"]},
        readings=[{"name": "cpu0 governor", "text": "performance"}, {"name": "free memory", "value": 12.0}],
    )
    now = StoredProvenance(runtime_version="3.13", machine={"kernel": "6.1", "cpu_features": []})
    runs: Any = [SimpleNamespace(record=SimpleNamespace(cases=[SimpleNamespace(provenance=one)])) for one in (old, now)]
    found = [(one.name, one.stored, one.now) for one in rerun._compare_provenance(*runs)]
    assert found == [("runtime version", "3.12", "3.13"), ("cpu0 governor", "performance", "")]


def test_board_of_variable_is_noted(monkeypatch):
    monkeypatch.setenv("HIL_BOARD", "rpi5")
    assert rerun._explain_variable("jetson", "rpi5") == "HIL_BOARD selects rpi5 instead of the stored board jetson"
    assert rerun._explain_variable("", "rpi5") == "HIL_BOARD selects rpi5 instead of the stored board"
    assert rerun._explain_variable("rpi5", "rpi5") == ""
    assert rerun._explain_variable("jetson", "pi4") == ""  # from --board
    assert rerun._explain_variable("jetson", "") == ""

"""The gate compares stored energies."""

from __future__ import annotations

import pytest

from hil.controller.records.base import Interval
from hil.controller.records.measurements.energy import EnergyMeasurement, UnitEnergy
from hil.controller.records.measurements.history import (
    HistoryEntry,
    MeasuredBoard,
    SeriesKey,
    SourceState,
    ToolVersions,
)
from hil.controller.workloads.gate.comparing.energies import compare_energies, describe_energies
from hil.controller.workloads.gate.judge import judge_case
from hil.controller.workloads.gate.plan import GateCase


def make_entry(joules: float, *, program: str = "p", half: float = 0.01, meter: str = "file") -> HistoryEntry:
    interval = Interval(low=joules * (1 - half), high=joules * (1 + half), level=0.99)
    return HistoryEntry(
        key=SeriesKey(kind="bench", model="m.onnx", case="m", board="b", runtime="iree"),
        run=program,
        case="m",
        created=1.0,
        source=SourceState(commit=program),
        outcome="PASS",
        p50_ns=1e6,
        clock="board",
        energy=EnergyMeasurement(meter=meter, per_inference=UnitEnergy(joules=joules, interval=interval)),
        program=program,
        tools=ToolVersions(),
        board=MeasuredBoard(name="b"),
    )


@pytest.mark.parametrize(
    ("new", "verdict"), [(1.2, "more"), (0.8, "less"), (1.04, "equal"), (0.97, "equal"), (1.0, "equal")]
)
def test_energies_differ_beyond_the_smallest_effect(new, verdict):
    found = compare_energies(make_entry(1.0), make_entry(new), 0.03)
    assert found is not None
    assert (found.ratio, found.verdict) == (pytest.approx(new), verdict)


def test_overlapping_intervals_are_equal():
    found = compare_energies(make_entry(1.0, half=0.2), make_entry(1.2, half=0.2), 0.03)
    assert found is not None
    assert (found.verdict, describe_energies(found)) == ("equal", "")


def test_energies_of_other_meters_are_not_compared():
    assert compare_energies(make_entry(1.0), make_entry(2.0, meter="rapl"), 0.03) is None
    assert compare_energies(make_entry(1.0).replace(energy=None), make_entry(2.0), 0.03) is None


def test_program_that_needs_more_energy_is_regressed():
    old, new = make_entry(0.001), make_entry(0.002, program="q")
    found = judge_case(GateCase(new, old, energy=compare_energies(old, new, 0.03)), None)
    assert (found.verdict, found.suspect) == ("regressed", "energy")
    assert found.reason == "2 mJ an inference instead of 1 mJ (2.00 times the energy)"
    assert found.energy is not None


def test_same_program_with_more_energy_has_no_change():
    old, new = make_entry(0.001), make_entry(0.002)
    found = judge_case(GateCase(new, old, energy=compare_energies(old, new, 0.03)), None)
    assert (found.verdict, found.suspect) == ("no change", "")
    assert "2.00 times the energy" in found.reason

"""The gate compares stored energies."""

from __future__ import annotations

import pytest

from hil.controller.analysis.detection.sequential import Decision
from hil.controller.analysis.detection.suspects import Suspect
from hil.controller.pipeline.records.energy_text import compare_energies, describe_energies
from hil.controller.records.base import Interval
from hil.controller.records.measurements.energy import EnergyMeasurement, UnitEnergy
from hil.controller.records.measurements.history import (
    HistoryEntry,
    MeasuredBoard,
    SeriesKey,
    SourceState,
    ToolVersions,
)
from hil.controller.workloads.gate.judge import Remeasurement, judge_case
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
    found = compare_energies(make_entry(1.0).energy, make_entry(new).energy, 0.03)
    assert found is not None
    assert (found.ratio, found.verdict) == (pytest.approx(new), verdict)


def test_overlapping_intervals_are_equal():
    found = compare_energies(make_entry(1.0, half=0.2).energy, make_entry(1.2, half=0.2).energy, 0.03)
    assert found is not None
    assert (found.verdict, describe_energies(found)) == ("equal", "")


def test_energies_of_other_meters_are_not_compared():
    assert compare_energies(make_entry(1.0).energy, make_entry(2.0, meter="rapl").energy, 0.03) is None
    assert compare_energies(None, make_entry(2.0).energy, 0.03) is None


def test_program_that_needs_more_energy_is_regressed():
    old, new = make_entry(0.001), make_entry(0.002, program="q")
    found = judge_case(GateCase(new, old, energy=compare_energies(old.energy, new.energy, 0.03)), None)
    assert (found.verdict, found.suspect) == ("regressed", "energy")
    assert found.reason.startswith("2 mJ an inference instead of 1 mJ (2.00 times the energy); the time is within")
    assert found.energy is not None


def test_same_program_with_more_energy_has_no_change():
    old, new = make_entry(0.001), make_entry(0.002)
    found = judge_case(GateCase(new, old, energy=compare_energies(old.energy, new.energy, 0.03)), None)
    assert (found.verdict, found.suspect) == ("no change", "")
    assert "2.00 times the energy" in found.reason


def test_same_program_with_new_tools_and_more_energy_is_toolchain():
    old, new = (
        make_entry(one).replace(tools=ToolVersions(runtime=tools)) for one, tools in ((0.001, "1"), (0.002, "2"))
    )
    found = judge_case(GateCase(new, old, energy=compare_energies(old.energy, new.energy, 0.03)), None)
    assert (found.verdict, found.suspect) == ("toolchain", "energy")
    assert "but 2 mJ an inference instead of 1 mJ" in found.reason


@pytest.mark.parametrize(("verdict", "ratio"), [("improved", 0.8), ("no change", 1.0)])
def test_faster_program_that_needs_more_energy_is_regressed(verdict, ratio):
    old, new = make_entry(0.001), make_entry(0.002, program="q")
    suspect = Suspect("step", "faster", 1, 0, 1, None, None)
    case = GateCase(new, old, suspect, energy=compare_energies(old.energy, new.energy, 0.03))
    again = Remeasurement(new="PASS", old="PASS", decision=Decision(verdict, 20, ratio, None))
    found = judge_case(case, again)
    assert found.verdict == "regressed"
    assert found.reason.startswith("2 mJ an inference instead of 1 mJ")


def test_less_energy_does_not_change_the_verdict():
    old, new = make_entry(0.002), make_entry(0.001, program="q")
    found = judge_case(GateCase(new, old, energy=compare_energies(old.energy, new.energy, 0.03)), None)
    assert found.verdict == "no change"
    assert found.reason.endswith("1 mJ an inference instead of 2 mJ (0.50 times the energy)")

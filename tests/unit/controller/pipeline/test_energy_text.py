"""Texts and table columns of energies."""

from __future__ import annotations

from hil.controller.pipeline.records.energy_text import ENERGY_COLUMNS, describe_energy, list_energy
from hil.controller.records.base import Interval
from hil.controller.records.measurements.energy import EnergyMeasurement, UnitEnergy


def make_unit(joules: float) -> UnitEnergy:
    return UnitEnergy(joules=joules, interval=Interval(low=joules * 0.9, high=joules * 1.1, level=0.99))


FOUND = EnergyMeasurement(
    meter="simulated",
    average_w=5.0,
    above_idle_w=3.0,
    peak_w=5.5,
    idle_w=2.0,
    per_inference=make_unit(1.0),
    per_prompt_token=make_unit(0.1),
    per_generated_token=UnitEnergy(joules=0.2, interval=None),
)


def test_columns_have_all_energies_and_powers():
    values = dict(zip(ENERGY_COLUMNS, list_energy(FOUND), strict=True))
    assert (values["joules"], values["joules_low"], values["joules_high"]) == (1.0, 0.9, 1.1)
    assert (values["average_w"], values["peak_w"], values["idle_w"]) == (5.0, 5.5, 2.0)
    assert (values["prompt_token_joules"], values["prompt_token_joules_low"]) == (0.1, 0.1 * 0.9)
    assert (values["generated_token_joules"], values["generated_token_joules_low"]) == (0.2, None)


def test_columns_without_energy_are_empty():
    assert set(list_energy(None)) == {None}
    refused = FOUND.replace(refused="idle drift", per_inference=None, per_prompt_token=None, per_generated_token=None)
    values = dict(zip(ENERGY_COLUMNS, list_energy(refused), strict=True))
    assert (values["joules"], values["prompt_token_joules"], values["idle_w"]) == (None, None, 2.0)


def test_description_has_intervals():
    assert describe_energy(FOUND) == [
        ("energy", "1 J (99%: 900 mJ to 1.1 J) an inference"),
        ("energy of tokens", "prompt 100 mJ (99%: 90 mJ to 110 mJ); generated 200 mJ"),
        ("power", "average 5 W, above idle 3 W, peak 5.5 W, idle 2 W"),
    ]


def test_description_of_refused_energy_has_the_reason():
    refused = EnergyMeasurement(meter="", refused="no meter", reason="the config has no [meter]")
    assert describe_energy(refused) == [("energy", "REFUSED: no meter: the config has no [meter]")]


def test_energy_whose_interval_contains_zero_has_a_note():
    unit = UnitEnergy(joules=4e-20, interval=Interval(low=-1e-6, high=1e-6, level=0.99))
    found = FOUND.replace(per_inference=unit, above_idle_w=4e-16)
    rows = dict(describe_energy(found))
    assert rows["energy"] == "0 J (99%: -1 uJ to 1 uJ; not measurable above idle) an inference"
    assert rows["power"] == "average 5 W, above idle 0 W, peak 5.5 W, idle 2 W"

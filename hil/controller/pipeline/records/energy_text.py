"""Format an energy measurement for the terminal."""

from __future__ import annotations

from hil.controller.records.measurements.energy import EnergyMeasurement, UnitEnergy
from hil.controller.storage.screen.texts import format_joules


def _format_unit_energy(found: UnitEnergy) -> str:
    interval = found.interval
    text = format_joules(found.joules)
    if interval:
        text += f" ({interval.level:.0%}: {format_joules(interval.low)} to {format_joules(interval.high)})"
    return text


def format_energy(found: EnergyMeasurement) -> str:
    """Format the energy of an inference with its interval, or why it is refused."""
    if found.refused:
        return f"REFUSED: {found.refused}: {found.reason}"
    return f"{_format_unit_energy(found.per_inference)} an inference" if found.per_inference else ""


def format_token_energy(found: EnergyMeasurement) -> str:
    """Format the energies of tokens, and why they are missing; "" without tokens."""
    energies = (("prompt", found.per_prompt_token), ("generated", found.per_generated_token))
    texts = [f"{title} {_format_unit_energy(one)}" for title, one in energies if one]
    return "; ".join([*texts, *filter(None, [found.token_reason])])


def format_power(found: EnergyMeasurement) -> str:
    """Format the average, peak and idle power, as far as they are known."""
    parts = (("average", found.average_w), ("above idle", found.above_idle_w), ("peak", found.peak_w))
    texts = [f"{title} {value:.3g} W" for title, value in (*parts, ("idle", found.idle_w)) if value is not None]
    return ", ".join(texts)

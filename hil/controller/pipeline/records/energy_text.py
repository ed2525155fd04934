"""Format energy measurements for the terminal and for tables, and compare them."""

from __future__ import annotations

from hil.controller.records.measurements.energy import EnergyComparison, EnergyMeasurement, UnitEnergy
from hil.controller.storage.screen.texts import format_joules

# Smaller differences are not reported: the meter and the board's temperature shift between sessions.
MIN_EFFECT = 0.05
_MIN_WATTS = 1e-9
# Columns of tables: prefix of the name, and the attribute of the measurement.
_UNITS = (("", "per_inference"), ("prompt_token_", "per_prompt_token"), ("generated_token_", "per_generated_token"))
_POWERS = ("average_w", "peak_w", "idle_w")
ENERGY_COLUMNS = (
    *("joules", "joules_low", "joules_high", *_POWERS),
    *("prompt_token_joules", "prompt_token_joules_low", "prompt_token_joules_high"),
    *("generated_token_joules", "generated_token_joules_low", "generated_token_joules_high"),
)


def format_unit_energy(found: UnitEnergy) -> str:
    """Format an energy with its interval, and a note if the energy may be 0."""
    interval = found.interval
    text = format_joules(found.joules)
    notes = []
    if interval:
        notes.append(f"{interval.level:.0%}: {format_joules(interval.low)} to {format_joules(interval.high)}")
    if text == "0 J" or (interval and interval.low <= 0 <= interval.high):
        notes.append("not measurable above idle")
    return f"{text} ({'; '.join(notes)})" if notes else text


def format_energy(found: EnergyMeasurement) -> str:
    """Format the energy of an inference with its interval, or why it is refused."""
    if found.refused:
        return f"REFUSED: {found.refused}: {found.reason}"
    return f"{format_unit_energy(found.per_inference)} an inference" if found.per_inference else ""


def format_token_energy(found: EnergyMeasurement) -> str:
    """Format the energies of tokens, and why they are missing; "" without tokens."""
    energies = (("prompt", found.per_prompt_token), ("generated", found.per_generated_token))
    texts = [f"{title} {format_unit_energy(one)}" for title, one in energies if one]
    return "; ".join([*texts, *filter(None, [found.token_reason])])


def format_power(found: EnergyMeasurement) -> str:
    """Format the average, peak and idle power, as far as they are known."""
    parts = (("average", found.average_w), ("above idle", found.above_idle_w), ("peak", found.peak_w))
    powers = [(title, value) for title, value in (*parts, ("idle", found.idle_w)) if value is not None]
    # A smaller power is an error of rounding.
    texts = [f"{title} {value if abs(value) >= _MIN_WATTS else 0:.3g} W" for title, value in powers]
    return ", ".join(texts)


def describe_energy(found: EnergyMeasurement) -> list[tuple[str, str]]:
    """Return the names and texts of a measurement, without empty texts."""
    rows = (
        ("energy", format_energy(found)),
        ("energy of tokens", format_token_energy(found)),
        ("power", format_power(found)),
    )
    return [(name, text) for name, text in rows if text]


def list_energy(found: EnergyMeasurement | None) -> list[float | None]:
    """Return the values of :data:`ENERGY_COLUMNS`."""
    values: dict[str, float | None] = dict.fromkeys(ENERGY_COLUMNS)
    if found is None:
        return list(values.values())
    values.update({name: getattr(found, name) for name in _POWERS})
    for prefix, name in _UNITS:
        unit: UnitEnergy | None = getattr(found, name)
        if unit is not None:
            values[f"{prefix}joules"] = unit.joules
            if unit.interval is not None:
                values[f"{prefix}joules_low"], values[f"{prefix}joules_high"] = unit.interval.low, unit.interval.high
    return list(values.values())


def compare_energies(
    old: EnergyMeasurement | None, new: EnergyMeasurement | None, min_effect: float
) -> EnergyComparison | None:
    """Compare the energies of an inference; None unless the same kind of meter measured both with an interval."""
    if old is None or new is None or old.meter != new.meter:
        return None
    a, b = old.per_inference, new.per_inference
    if a is None or b is None or a.interval is None or b.interval is None or a.joules <= 0 or b.joules <= 0:
        return None
    ratio, effect = b.joules / a.joules, max(min_effect, MIN_EFFECT)
    is_more = b.interval.low > a.interval.high and ratio > 1 + effect
    is_less = b.interval.high < a.interval.low and ratio < 1 / (1 + effect)
    return EnergyComparison(
        ratio=ratio,
        old_joules=a.joules,
        new_joules=b.joules,
        verdict="more" if is_more else "less" if is_less else "equal",
    )


def describe_energies(found: EnergyComparison | None) -> str:
    """Return a change of the energy in one line; "" without a change."""
    if found is None or found.verdict == "equal":
        return ""
    energies = f"{format_joules(found.new_joules)} an inference instead of {format_joules(found.old_joules)}"
    return f"{energies} ({found.ratio:.2f} times the energy)"

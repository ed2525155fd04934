"""Compare the stored energies of two entries of the history."""

from __future__ import annotations

from hil.controller.records.measurements.energy import EnergyComparison
from hil.controller.records.measurements.history import HistoryEntry
from hil.controller.storage.screen.texts import format_joules

# Smaller differences are not reported: the meter and the board's temperature shift between sessions.
MIN_EFFECT = 0.05


def compare_energies(old: HistoryEntry, new: HistoryEntry, min_effect: float) -> EnergyComparison | None:
    """Compare the energies of an inference; None unless the same kind of meter measured both with an interval."""
    if old.energy is None or new.energy is None or old.energy.meter != new.energy.meter:
        return None
    a, b = old.energy.per_inference, new.energy.per_inference
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

"""Records of energy measurements."""

from __future__ import annotations

from typing import Annotated, Literal

from hil.controller.records.base import Count, Interval, Record, note

EnergyRefusal = Literal[
    "no meter",
    "meter failed",
    "clock not fitted",
    "too few samples",
    "lost samples",
    "idle drift",
    "gpio mismatch",
    "invalid samples",
    "times not increasing",
    "negative power",
    "negative energy",
]


class UnitEnergy(Record, kw_only=True):
    """Energy above idle for an inference or a token."""

    joules: float
    interval: Annotated[Interval | None, note("confidence interval of the mean; null with too few windows")]


class EnergyMeasurement(Record, kw_only=True):
    """Energy of a program, measured in windows of multiple inferences. The energies exclude the idle power."""

    meter: Annotated[str, note("kind of the meter; empty without a meter")]
    refused: Annotated[EnergyRefusal | None, note("why the energy is not reported; null if it is")] = None
    reason: Annotated[str, note("details of the refusal, or empty")] = ""
    windows: Annotated[Count, note("number of measured windows")] = 0
    inferences: Annotated[Count, note("inferences in all windows")] = 0
    samples: Annotated[Count, note("samples in the window with the fewest samples")] = 0
    idle_w: Annotated[float | None, note("mean power before and after the windows; null if unknown")] = None
    idle_before_w: float | None = None
    idle_after_w: float | None = None
    average_w: Annotated[float | None, note("mean power in the windows, including the idle power")] = None
    above_idle_w: Annotated[float | None, note("mean power in the windows, minus the idle power")] = None
    peak_w: Annotated[float | None, note("highest power of a sample in the windows, including the idle power")] = None
    per_inference: Annotated[UnitEnergy | None, note("null if refused; with --generate, of a whole generation")] = None
    per_prompt_token: Annotated[UnitEnergy | None, note("null without --generate, or if refused")] = None
    per_generated_token: Annotated[UnitEnergy | None, note("null without --generate, or if refused")] = None
    token_reason: Annotated[str, note("why the energy of tokens is not reported, or empty")] = ""


class EnergyComparison(Record, kw_only=True):
    """Comparison of the stored energies of an inference."""

    ratio: Annotated[float, note("new energy divided by old energy")]
    old_joules: float
    new_joules: float
    verdict: Annotated[
        Literal["more", "less", "equal"],
        note("`equal` unless the intervals do not overlap, and the ratio exceeds the smallest effect"),
    ]

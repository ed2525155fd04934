"""Records of a board's state during a measurement, and of the measurement's grade."""

from __future__ import annotations

from typing import Annotated, Literal

from hil.controller.records.base import Count, Record, note

# A: steady. B: noisy. F: not comparable with other measurements.
Grade = Literal["A", "B", "F"]
_MEANINGS = {"A": "steady", "B": "noisy", "F": "not comparable"}


class ConditionReading(Record, kw_only=True):
    """A reading of the board. Values that the board did not report are null."""

    name: Annotated[str, note("as in `readings` of the provenance")]
    unit: str = ""
    before: Annotated[float | str | None, note("before the measurement")] = None
    low: Annotated[float | None, note("lowest value during the measurement")] = None
    median: float | None = None
    high: Annotated[float | None, note("highest value during the measurement")] = None
    after: Annotated[float | str | None, note("after the measurement")] = None


class Conditions(Record, kw_only=True):
    """State of a board before, during and after a measurement."""

    readings: list[ConditionReading]
    events: Annotated[list[str], note("changes on the board during the measurement, such as throttling")]
    samples: Annotated[Count, note("how often the counters were read during the measurement")] = 0
    cores: Annotated[Count | None, note("CPU cores of the board; null if the counters were not read")] = None
    busy_cores: Annotated[float | None, note("mean number of busy cores during the measurement")] = None
    other_load: Annotated[float | None, note("mean number of cores kept busy by other programs, at least")] = None
    memory_pressure: Annotated[float | None, note("mean share of time stalled on memory, in percent")] = None
    missing: Annotated[str, note("why the counters could not be read; empty if they were read")] = ""


class MeasurementGrade(Record, kw_only=True):
    """Grade of a measurement, with the reasons for a grade other than A."""

    grade: Annotated[Grade, note("A: steady, B: noisy, F: not comparable")]
    reasons: list[str]

    @property
    def title(self) -> str:
        """Return the grade and the meaning."""
        return f"{self.grade}: {_MEANINGS[self.grade]}"

    @property
    def text(self) -> str:
        """Return the title with the reasons."""
        return f"{self.title} ({'; '.join(self.reasons)})" if self.reasons else self.title


def is_comparable(grade: MeasurementGrade | None) -> bool:
    """Return whether times with a grade can be compared. Times without a grade can be compared."""
    return grade is None or grade.grade != "F"


class Settling(Record, kw_only=True):
    """Wait for a steady board before a measurement (--settle)."""

    waited_s: Annotated[float, note("seconds on the host's clock")]
    steady: Annotated[bool, note("false if the board was not steady within the limit")]
    unsteady: Annotated[list[str], note("what was not steady at the end")] = []

"""Records of `hil rerun`."""

from __future__ import annotations

from typing import Annotated, Literal

from hil.controller.records.base import Record, note
from hil.controller.records.measurements.bench import BenchTimes, SpeedComparison
from hil.controller.records.measurements.conditions import MeasurementGrade


class RerunDifference(Record, kw_only=True):
    """A fact that differs between the stored measurement and the new one."""

    name: str
    stored: Annotated[str, note("empty if unknown")]
    now: Annotated[str, note("empty if unknown")]


class RerunMeasurement(Record, kw_only=True):
    """A measurement of the program."""

    id: Annotated[str, note("ID of the run")]
    folder: Annotated[str, note("directory of the run")]
    outcome: Annotated[str, note("an outcome; empty if the bench did not end")]
    times: Annotated[BenchTimes | None, note("null if nothing was measured")]
    grade: Annotated[MeasurementGrade | None, note("of the times alone; null if nothing was measured")]


class RerunRecord(Record, kw_only=True):
    """Output of `hil rerun`, and rerun.json in the directory of the new run."""

    schema: Literal[1]
    board: str
    stored: RerunMeasurement
    now: RerunMeasurement
    comparison: Annotated[
        SpeedComparison | None,
        note("the new median compared with the stored median, in one round; null if they are not comparable"),
    ]
    not_comparable: Annotated[list[str], note("why the medians are not comparable")]
    differences: Annotated[list[RerunDifference], note("differences of board, versions and conditions")]
    exit_code: int

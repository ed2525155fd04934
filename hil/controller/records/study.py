"""Record of a study: study.json, and the output of `hil study run --json`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from hil.controller.records.base import Count, Number, Record, Timestamp, make_record, note
from hil.controller.records.console import StoredConsole
from hil.controller.records.outputs import Origin, Placement, RelationName
from hil.core.results import Outcome


class StudyStage(Record, kw_only=True):
    """Result of a stage of a row."""

    name: str
    outcome: Literal["pass", "fail", "not reached"] = "not reached"
    seconds: float | None = None
    message: Annotated[str, note("message of the error, or empty")] = ""


class StudyDeviation(Record, kw_only=True):
    """Largest difference from TensorFlow over all values in all steps."""

    max_abs: Number
    max_ulp: Count | None
    of: Annotated[str, note("name of the tensor")]
    step: Annotated[int, note("number of the step, from 1", ge=1)]


class StudyRow(Record, kw_only=True):
    """Result of an experiment with a compiler."""

    experiment: str
    title: str
    reported: Annotated[str, note("result in an older report, or empty")]
    toolchain: Annotated[str, note("`tfcompile` or `iree`")]
    compiler: Annotated[str, note("compiler with its version; empty before the compilation")] = ""
    relation: Annotated[RelationName, note("components that TensorFlow's training shares with the program")]
    outcome: Annotated[Outcome | None, note("null if the row has not ended")] = None
    stages: list[StudyStage]
    failed_stage: str = ""
    message: Annotated[str, note("message of the failed stage, or empty")] = ""
    detail: Annotated[str, note("error output of the tool")] = ""
    bytes: Annotated[Count | None, note("size of the program")] = None
    program: Annotated[
        str, note("file of the program in the study's directory, next to the inputs and outputs; or empty")
    ] = ""
    steps: Annotated[Count, note("training steps that agreed with TensorFlow")] = 0
    worst: StudyDeviation | None = None
    placement: Placement = None

    def fail(self, stage: StudyStage, message: str) -> None:
        """Mark a stage of the row as failed."""
        stage.outcome, stage.message = "fail", message
        self.failed_stage, self.message = stage.name, message


class StudySettings(Record, kw_only=True):
    """Settings of a study that affect its results."""

    steps: Annotated[int, note("training steps", ge=1)]
    seed: Annotated[int, note("for initial values and data")]
    rtol: float
    atol: Annotated[float | None, note("null: derived from the tensor's scale and noise")]
    no_fallback: Annotated[bool, note("true if a node on an unrequested device fails a row")]
    allow_blind: Annotated[list[str], note("patterns of tensors that may pass although they cannot be judged")]
    accept: Annotated[list[str], note("criteria that replace the tolerance")] = []


class StudyBoard(Record, kw_only=True):
    """Board of a study; empty texts if the study ended before the board was used."""

    name: str = ""
    hw_type: str = ""


class StudyRecord(Record, kw_only=True):
    """A study: a row for every experiment and compiler."""

    schema: Literal[1]
    folder: Annotated[str, note("directory of the study")]
    created: Timestamp = 0.0
    origin: Origin | None = None
    command: Annotated[str, note("command that repeats the study, or empty")] = ""
    asked: StudySettings
    board: StudyBoard
    finished: bool
    rows: list[StudyRow]
    consoles: Annotated[list[StoredConsole], note("consoles of the boards")] = []
    exit_code: int


def make_study(values: Any) -> StudyRecord:
    """Convert study.json to a record. Raises UsageError.

    The key of ``toolchain`` was ``way`` before version 0.1.
    """
    if isinstance(values, dict) and isinstance(values.get("rows"), list):
        values = {**values, "rows": [_upgrade_row(row) for row in values["rows"]]}
    return make_record(values, StudyRecord)


def _upgrade_row(values: Any) -> Any:
    if isinstance(values, dict) and "way" in values:
        return {"toolchain": values["way"], **values}
    return values

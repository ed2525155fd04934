"""Records of a matrix: matrix.json, and the table that `--json` prints."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType

from hil.controller.records.base import Count, Number, Record, Timestamp, note
from hil.controller.records.measurements.conditions import Grade
from hil.controller.records.outputs import Origin

MatrixKind = Literal["run", "bundle", "suite", "trace"]


class TargetError(Record, kw_only=True):
    """Error of a target that could not run."""

    outcome: Annotated[str, note("outcome of the error, or empty")]
    message: str
    hint: str
    exit_code: int


class StoredTarget(Record, kw_only=True):
    """Target of a matrix. The run is in the directory with the target's name."""

    name: str
    options: Annotated[dict[str, str], note("options of the target; empty for runs from elsewhere")] = {}
    error: TargetError | None = None


class MatrixRecord(Record, kw_only=True):
    """Runs in a directory as a matrix: matrix.json of pytest and of fetched farm jobs."""

    schema: Literal[1]
    id: str
    title: str
    created: Timestamp = 0.0
    origin: Origin | None = None
    targets: list[StoredTarget]


class MatrixBoards(Record, kw_only=True):
    """Boards of a matrix, for lists of runs."""

    name: Annotated[str, note("names of all targets")]


class MatrixCase(Record, kw_only=True):
    """Case of a matrix, for lists of runs."""

    name: str
    outcome: Annotated[str, note("outcomes of all targets, separated by slashes")]


class MatrixRun(MatrixRecord, kw_only=True):
    """A matrix that hil runs target by target: matrix.json."""

    kind: MatrixKind
    again: Annotated[str, note("command that repeats the matrix, or empty")] = ""
    request: Annotated[dict[str, Any], note("options of the command; those of a target override them")]
    command: Annotated[str, note("command that resumes the matrix; empty if none can")]
    board: MatrixBoards
    cases: list[MatrixCase]
    outcome: Annotated[str | None, note("outcome of the worst case")]
    exit_code: int | None
    finished: bool


class PrintedTarget(Record, kw_only=True):
    """Target in a printed matrix."""

    name: str
    folder: Annotated[str, note("directory of the run; empty if the target could not run")]
    flow: str
    runtime: str
    boards: list[str]
    error: TargetError | None
    exit_code: int


class PrintedCell(Record, kw_only=True):
    """Result of a case on a target. The statistics describe the worst output."""

    outcome: Annotated[str, note("an outcome, `not run`, or `absent` if the target lacks the case")]
    stage: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    mismatches: Count | UnsetType = UNSET
    max_abs: Number | UnsetType = UNSET
    sqnr_db: Number | UnsetType = UNSET
    device_p50_ms: float | UnsetType = UNSET
    iterations: Count | UnsetType = UNSET
    cold: bool | UnsetType = UNSET
    grade: Annotated[Grade | UnsetType, note("of the time; absent without a grade")] = UNSET
    worst_kl: Annotated[Number | UnsetType, note("of prompts, like the following fields")] = UNSET
    ttft_ms: float | UnsetType = UNSET
    tpot_p50_ms: float | UnsetType = UNSET
    decode_tokens_per_s: float | UnsetType = UNSET


class PrintedRow(Record, kw_only=True):
    """Case in a printed matrix."""

    id: str
    model: str
    layer: str
    op: str
    differs: Annotated[bool, note("true if the outcomes differ between targets")]
    cells: Annotated[dict[str, PrintedCell], note("target -> result")]


class MatrixDocument(Record, kw_only=True):
    """A matrix as `--json` prints it."""

    folder: Annotated[str, note("directory of the matrix; empty if nothing was written")]
    title: str
    targets: list[PrintedTarget]
    rows: list[PrintedRow]
    differing: Annotated[Count, note("number of rows that differ")]
    exit_code: Annotated[int, note("most severe exit code of the targets")]

"""Records of the roofline: measured peaks of a board, the work of a model, and the distance to the peaks."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from hil.controller.records.base import Count, Interval, Record, Timestamp, note
from hil.controller.records.measurements.conditions import Conditions, MeasurementGrade
from hil.controller.records.stack import StackPart

PeakType = Literal["f32", "f16", "int8"]
PeakKernel = Literal["matmul", "add", "sum"]
PeakClock = Literal["board", "device", "instructions"]
Bound = Literal["compute", "memory", ""]


class PeakPoint(Record, kw_only=True):
    """Measured program: a kernel with a size. Times are nanoseconds, or instructions with this clock."""

    kernel: Annotated[PeakKernel, note("`matmul`: N x N matrices; `add`: sum of two arrays; `sum`: sum of an array")]
    dtype: PeakType
    size: Annotated[int, note("N of a matmul, or the number of elements of an array", ge=1)]
    work: Annotated[int, note("operations of a matmul, or bytes read and written by another kernel", ge=1)]
    iterations: Annotated[int, Meta(ge=1)]
    p10: Annotated[float, note("10th percentile of the time of an iteration")]
    p50: float
    p90: float
    rate: Annotated[float, note("work divided by p50, per second (per instruction with this clock)")]
    interval: Annotated[Interval | None, note("of the rate; null with too few iterations")] = None
    grade: Annotated[MeasurementGrade | None, note("of the times; null if the clock counts instructions")] = None
    conditions: Annotated[Conditions | None, note("of the board; null if it does not report them")] = None


class PeakValue(Record, kw_only=True):
    """Peak in operations or bytes per second."""

    rate: Annotated[float, note("per second; per instruction with this clock", ge=1e-6, lt=1e21)]
    interval: Annotated[Interval | None, note("null with too few iterations, and for a value of a data sheet")] = None
    spread: Annotated[
        float | None, note("distance from p10 to p90 of the times, divided by p50; null for a value of a data sheet")
    ] = None
    kernel: Annotated[str, note("kernel and size; empty for a value of a data sheet")] = ""


class BoardPeaks(Record, kw_only=True):
    """Peaks of a board with a runtime and a device."""

    schema: Literal[1]
    id: Annotated[str, note("name of the stored file; empty for values of a data sheet")]
    source: Literal["measured", "data sheet"]
    created: Annotated[Timestamp, note("seconds since the epoch; 0 for values of a data sheet")]
    board: str
    runtime: Annotated[str, note("name; empty for values of a data sheet")]
    runtime_version: str
    device: str
    software: Annotated[str, note("name of a device that the CPU computes; otherwise empty")] = ""
    cpu: Annotated[str, note("CPU model and cores, if known")] = ""
    flags: Annotated[list[str], note("flags of the compiler")] = []
    stack: list[StackPart] = []
    clock: Annotated[PeakClock, note("clock of the times; `device` is the clock of a GPU or accelerator")] = "board"
    tick_hz: Annotated[int | None, note("ticks per second of a microcontroller; null for other boards")] = None
    parallelism: Annotated[float | None, note("mean number of busy cores in the fastest matmul")] = None
    compute: Annotated[dict[str, PeakValue], note("operations per second by type: f32, f16 or int8")]
    memory: Annotated[PeakValue | None, note("bytes per second; null if it was not measured")]
    points: list[PeakPoint] = []
    notes: Annotated[list[str], note("missing values, and conditions that make the peaks uncertain")] = []


class PeakReport(Record, kw_only=True):
    """Output of `hil board peak`."""

    board: str
    peaks: Annotated[list[BoardPeaks], note("newest first")]
    file: Annotated[str, note("file of the new measurement; empty with --stored")] = ""
    exit_code: int = 0


class OperatorWork(Record, kw_only=True):
    """Work of an operator, computed from shapes."""

    name: str
    op_type: str
    flops: Annotated[Count | None, note("operations; a multiply-accumulate counts as two; null if not counted")]
    bytes: Annotated[Count | None, note("inputs, weights and outputs, each once; null if a shape is unknown")]
    shapes: Annotated[str, note("inputs and outputs; ? for an unknown shape")] = ""


class ModelWork(Record, kw_only=True):
    """Output of `hil profile work`: the work of a model."""

    model: str
    function: str
    flops: Annotated[Count, note("sum of the counted operators")]
    bytes: Annotated[Count, note("sum of the counted operators, without fusion")]
    model_bytes: Annotated[Count | None, note("inputs, weights and outputs of the model; null if a shape is unknown")]
    operators: Annotated[list[OperatorWork], note("in the model's order")]
    not_counted: Annotated[dict[str, Count], note("operator -> number of operators that are not counted")]


class RooflineRow(Record, kw_only=True):
    """Work and time of operations. The work and the time are those of an iteration."""

    name: str
    kind: Annotated[Literal["model", "compute", "runtime"], note("`model` for the whole model")]
    onnx_nodes: list[str]
    op_types: list[str]
    dtype: Annotated[PeakType | Literal[""], note("type of the compute peak; empty if several or none")]
    time_ns: Annotated[float | None, note("median; null if not measured")]
    time: Annotated[Interval | None, note("of the median; null with too few iterations")]
    share: Annotated[float, note("share of the time of all operations", ge=0, le=1)]
    flops: Annotated[Count | None, note("null if not counted; for the model, the sum of the counted operations")]
    bytes: Annotated[Count | None, note("as flops")]
    intensity: Annotated[float | None, note("operations per byte")]
    flops_per_s: float | None
    bytes_per_s: float | None
    bound: Annotated[Bound, note("roof that limits the operations; empty if unknown")]
    roof_flops_per_s: Annotated[
        float | None, note("highest speed at this intensity; null if unknown, and without operations")
    ]
    shortest_ns: Annotated[float | None, note("shortest time at the peaks; null if unknown")]
    attained: Annotated[
        float | None, note("shortest time divided by the measured time; a lower limit if the work is incomplete")
    ]
    interval: Annotated[Interval | None, note("of attained, from the intervals of the time and of the peaks")]
    is_above: Annotated[bool, note("true if the operations are faster than the peaks")] = False


class UncountedWork(Record, kw_only=True):
    """Operations that the roofline cannot judge."""

    operators: Annotated[Count, note("operations of the model without a count of operations or bytes")]
    share: Annotated[
        float | None, note("their share of the time of all operations; null if the runtime does not profile operations")
    ]
    op_types: Annotated[list[str], note("operator types, or names of operations without a type")]
    runtime_share: Annotated[float, note("share of the runtime's own work, such as copies", ge=0, le=1)]


class RooflineReport(Record, kw_only=True):
    """Output of `hil profile roofline`."""

    run: str
    model: str
    board: str
    runtime: str
    timed_by: Annotated[str, note("device that timed the operations; empty for the board's clock")]
    peaks: Annotated[BoardPeaks | None, note("null without peaks for the board: only work and speed are known")]
    whole: RooflineRow
    uncounted: UncountedWork
    by: Literal["op", "node", "type"]
    groups: Count
    rows: Annotated[list[RooflineRow], note("longest time first")]
    warnings: list[str]
    plot: str | None = None

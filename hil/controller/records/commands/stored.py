"""Documents of commands for stored results: `hil runs`, `cache`, `profile` and `publish`."""

from __future__ import annotations

from typing import Annotated, Any

from hil.controller.records.base import Count, Number, Record, note
from hil.core.timeline import Ticks


class RunSummary(Record, kw_only=True):
    """A stored run."""

    id: str
    created: Annotated[float, note("seconds since the epoch")]
    models: str
    board: str
    outcome: Annotated[str | None, note("outcome of the worst case; null if not finished")]
    exit_code: int | None
    finished: bool
    origin: Annotated[str, note("labels, branch and commit, or empty")]
    labels: Annotated[list[str], note("from --label and HIL_LABELS")]


class RunList(Record, kw_only=True):
    """Output of `hil runs list`."""

    runs: Annotated[list[RunSummary], note("oldest first")]


class DeletedRuns(Record, kw_only=True):
    """Output of `hil runs gc` and `hil runs rm`."""

    deleted: Annotated[list[str], note("IDs")]
    dry_run: Annotated[bool, note("true if hil only lists the runs")] = False


class CacheEntry(Record, kw_only=True):
    """An entry of the cache."""

    key: str
    path: str
    size: Annotated[Count, note("bytes")]
    last_used: Annotated[float, note("seconds since the epoch")]
    meta: dict[str, Any]
    kind: str


class CacheList(Record, kw_only=True):
    """Output of `hil cache ls`."""

    root: str
    entries: Annotated[list[CacheEntry], note("most recently used first")]


class DeletedEntries(Record, kw_only=True):
    """Output of `hil cache gc`."""

    dropped: Annotated[list[str], note("keys")]
    freed_bytes: Count


class ProfileTotal(Record, kw_only=True):
    """The sums of a group of operations. Times are nanoseconds on the board's clock."""

    name: Annotated[str, note("operation, ONNX nodes or node types")]
    kind: Annotated[str, note("`compute` for operations of the model, or `runtime`")]
    onnx_nodes: Annotated[tuple[str, ...], note("in order of first execution, as the following lists")]
    op_types: tuple[str, ...]
    ops: tuple[str, ...]
    calls: Annotated[int, note("number of executions in all iterations", ge=1)]
    total_ns: Annotated[int, note("exclusive time, as mean_ns and p50_ns: without operations that it contains")]
    run_ns: Annotated[float, note("time per iteration, the median over the iterations")]
    mean_ns: float
    p50_ns: float
    share: Annotated[float, note("run_ns divided by the sum over all groups", ge=0, le=1)]
    parallelism: Annotated[float | None, note("mean number of busy threads; null if the runtime does not report it")]
    flops_per_s: Annotated[float | None, note("estimated work divided by measured time; null without an estimate")]
    bytes_per_s: Annotated[float | None, note("estimated traffic divided by measured time; null without an estimate")]
    intensity: Annotated[float | None, note("estimated operations per byte; null if unknown")]
    bound_estimate: Annotated[str, note("`compute` or `memory` if all estimates agree, otherwise empty")]


class ProfileSummary(Record, kw_only=True):
    """Output of `hil profile show`."""

    run: str
    model: str
    board: str
    runtime: str
    timed_p50_ns: Annotated[float | None, note("median of runs without a profiler; null if not measured")]
    profiled_p50_ns: Annotated[float | None, note("median of profiled runs; null if not measured")]
    iterations: Count
    overhead: Annotated[float | None, note("relative time that profiling adds: 0.05 for 5 %")]
    rows: Count
    clock_error_ns: Count
    by: Annotated[str, note("`op`, `node` or `type`")]
    groups: Annotated[Count, note("number of groups; `totals` has the first --top")]
    totals: Annotated[list[ProfileTotal], note("the longest time first")]
    notes: list[str]
    plot: Annotated[str | None, note("file of --plot")]
    ticks: Annotated[Ticks | None, note("of all operations on an emulated board; null on others")] = None


class QueryResult(Record, kw_only=True):
    """Output of `hil profile query`."""

    columns: list[str]
    rows: list[list[Annotated[int | float | str | None, note("blobs are hexadecimal")]]]


class OperationCost(Record, kw_only=True):
    """An operation's cost per iteration. The times of repeated executions in an iteration are added up."""

    p50_ns: float
    mean_ns: float
    share: Annotated[float, note("p50_ns divided by the sum over all operations; 1 for totals and timed runs")]
    iterations: int


class OperationChange(Record, kw_only=True):
    """An operation in two profiles, or a group of operations if the compilers fused the nodes differently."""

    name: Annotated[str, note("ONNX nodes joined by `;`, or the name of an operation without nodes")]
    kind: Annotated[str, note("`compute`, `runtime`, `total` for all operations, or `timed` for the timed runs")]
    a_ops: Annotated[list[str], note("names in the runtime of a; empty if missing")]
    b_ops: list[str]
    a: Annotated[OperationCost | None, note("null if missing")]
    b: OperationCost | None
    ratio: Annotated[Number, note("time in b divided by time in a; null if missing or incomparable")]
    low: Annotated[Number, note("confidence interval of the ratio; null with too few iterations")]
    high: Number
    change: Annotated[str, note("`slower`, `faster`, `only in a`, `only in b`, or empty without significant change")]
    change_ns: Annotated[float | None, note("change of the time per iteration; null if incomparable")]


class ProfileComparison(Record, kw_only=True):
    """Output of `hil profile diff`."""

    a: str
    b: str
    confidence: Annotated[float, note("for all intervals together")]
    margin: Annotated[float, note("0.05 ignores changes below 5 %")]
    verdict: Annotated[str, note("faster run, decided by the timed runs")]
    incomparable: Annotated[str, note("reason why the profiled times cannot be compared, or empty")]
    a_overhead: Annotated[float | None, note("relative time that profiling adds: 3.0 for 300 %")]
    b_overhead: float | None
    timed: OperationChange
    total: OperationChange
    ops: Annotated[list[OperationChange], note("the largest change first; if incomparable, the largest share first")]
    plot: Annotated[str | None, note("file of --plot")]
    trace: Annotated[str | None, note("file of --trace")]


class MergedProfile(Record, kw_only=True):
    """A profile of a merged trace."""

    run: str
    model: str
    board: str


class MergedTrace(Record, kw_only=True):
    """Output of `hil profile merge`."""

    profiles: list[MergedProfile]
    trace: Annotated[str, note("written file")]
    events: Annotated[int, note("slice starts and ends, and counter values")]
    bytes: int
    seconds: Annotated[float, note("time for writing")]


class NodeDataFile(Record, kw_only=True):
    """Output of `hil profile export`."""

    node_data: Annotated[str, note("written file")]
    nodes: Count


class ImportedProfile(Record, kw_only=True):
    """Output of `hil profile import`."""

    profile: Annotated[str, note("written directory")]
    model: str
    board: str
    rows: Annotated[Count, note("operations of the model and the runtime")]


class PublishResult(Record, kw_only=True):
    """Output of `hil publish`."""

    id: str
    url: Annotated[str, note("URL of the session's page")]
    new: Annotated[bool, note("false if the server already had the session")]
    files: Count
    bytes: Count
    sent_files: Annotated[Count, note("number of uploaded files")]
    sent_bytes: Count
    left_out: Annotated[list[str], note("files that were not published")]

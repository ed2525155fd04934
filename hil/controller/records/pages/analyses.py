"""Documents of the pages of profiles, graphs and tensors."""

from __future__ import annotations

from typing import Annotated

from hil.controller.records.base import Number, Record, note
from hil.controller.records.commands.stored import ProfileTotal
from hil.controller.records.measurements.roofline import RooflineReport
from hil.controller.records.pages.common import CaseSummary, PageDocument, Pages, Seconds, SessionSummary, Total
from hil.core.timeline import Ticks


class ProfileName(Record, kw_only=True):
    """Stored profile."""

    name: str
    key: Annotated[str, note("the parameter `profile` of /trace")]
    kind: Annotated[str, note("run, compile, or trace for a profile that only has a trace")]
    changed: Seconds


class ProfilesDocument(PageDocument, kw_only=True):
    """Stored profiles."""

    profiles: list[ProfileName]
    total: Total


class ProfiledTimes(Record, kw_only=True):
    """Durations of runs."""

    timed_p50_ns: Number
    profiled_p50_ns: Number
    iterations: int


class ProfileDocument(PageDocument, kw_only=True):
    """Operations of a profiled run."""

    profile: ProfileName
    times: ProfiledTimes
    ticks: Annotated[Ticks | None, note("of all operations on an emulated board, which has no times")]
    roofline: Annotated[RooflineReport | None, note("null if the directory has no peaks")] = None
    operations: list[ProfileTotal]
    total: Total
    pages: Pages


class TraceOnlyDocument(PageDocument, kw_only=True):
    """Profile that only has a trace."""

    profile: ProfileName


class CompilationStep(Record, kw_only=True):
    """Phase or pass of a compilation."""

    name: str
    seconds: Number
    share: Number
    phase: str
    runs: int


class CompiledOperationEstimate(Record, kw_only=True):
    """Operation of a compiled program with estimates."""

    name: str
    share: Number
    seconds: Number
    flops: Number
    bytes: Number
    bound: str


class CompilationDocument(PageDocument, kw_only=True):
    """Profile of a compilation."""

    profile: ProfileName
    seconds: Number
    phases: list[CompilationStep]
    passes: list[CompilationStep]
    operations: list[CompiledOperationEstimate]
    dispatches: int
    program_bytes: int


class OperationTime(Record, kw_only=True):
    """Time of an operation in a profile."""

    p50_ns: Number
    share: Number


class OperationDifference(Record, kw_only=True):
    """Operation in two profiles."""

    name: str
    kind: str
    a: OperationTime | None
    b: OperationTime | None
    change: str
    change_ns: Number
    ratio: Number
    low: Number
    high: Number


class ProfilesComparedDocument(PageDocument, kw_only=True):
    """Comparison of two profiles."""

    a: ProfileName
    b: ProfileName
    incomparable: Annotated[str, note("why the profiled times cannot be compared, or empty")]
    timed: OperationDifference
    operations: list[OperationDifference]
    total: Total
    pages: Pages


class GraphSource(Record, kw_only=True):
    """Graph of a side."""

    title: str
    kind: str
    model: str
    notes: list[str]
    nodes: Annotated[int, note("number of nodes")]


class NodeResult(Record, kw_only=True):
    """Values of a node."""

    name: str
    op: str
    outcome: str
    reason: str
    tolerance_ratio: Annotated[Number, note("error divided by the tolerance; above 1 if out of tolerance")]
    is_ratio_bound: Annotated[bool, note("true if tolerance_ratio is only an upper bound")]
    max_abs: Number
    sqnr_db: Number
    time_ns: Number
    placement: str
    case: str
    other: Annotated[str, note("value on the second side, or empty")]


class GraphDocument(PageDocument, kw_only=True):
    """Nodes of a model with recorded values."""

    metric: str
    metrics: Annotated[list[str], note("metrics with values: the parameter `by`")]
    sides: list[GraphSource]
    nodes: list[NodeResult]
    total: Total
    pages: Pages


class TensorSource(Record, kw_only=True):
    """Tensor of a case, or a compared pair."""

    kind: str
    name: str
    against: str
    beside: str


class TensorJudgement(Record, kw_only=True):
    """Comparison within a tolerance."""

    outcome: Annotated[str | None, note("null if hil rejects the tolerance")]
    reason: str
    statistics: Annotated[dict[str, Number] | None, note("counts and statistics by name; null without a comparison")]


class WorstElement(Record, kw_only=True):
    """Element of two tensors."""

    index: list[int]
    actual: Annotated[str, note("exact text, as `reference`")]
    reference: str
    difference: Number
    relative: Number
    ulp: int | None
    mismatch: Annotated[bool, note("true if out of tolerance")]


class ElementCounts(Record, kw_only=True):
    """Counts of a tensor."""

    elements: int
    nan: int
    infinite: int
    zeros: int
    least: Number
    largest: Number
    mean: Number
    deviation: Number


class HistogramBin(Record, kw_only=True):
    """Bin of a histogram."""

    low: Number
    high: Number
    counts: Annotated[list[int], note("a count per tensor")]


class TensorCharts(Record, kw_only=True):
    """Counts over all elements."""

    sides: list[ElementCounts]
    values: list[HistogramBin]
    errors: Annotated[list[HistogramBin], note("absolute differences of elements that differ")]
    equal: int


class TensorDocument(PageDocument, kw_only=True):
    """Tensor with its statistics. A part is null if it does not apply, or if it is slow and not requested."""

    session: SessionSummary | None
    case: CaseSummary | None
    subjects: Annotated[list[TensorSource], note("tensors of the case")]
    subject: TensorSource
    types: Annotated[list[str], note("dtype and shape of each tensor")]
    apart: Annotated[str, note("why the tensors cannot be compared, or empty")]
    later: Annotated[list[str], note("omitted parts: request one with the parameter `now`, or `all`")]
    judgement: TensorJudgement | None
    worst: list[WorstElement] | None
    charts: TensorCharts | None


class TensorDtypeDocument(PageDocument, kw_only=True):
    """File with raw bytes: the parameter `dtype` is required."""

    subject: TensorSource
    choices: Annotated[list[str], note("possible values of `dtype`")]

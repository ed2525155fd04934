"""Records that all stored documents share: tensors, comparisons with a reference, verdicts, placement, origin."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from hil.controller.records.base import Count, Number, Record, note
from hil.core.placement_reasons import format_reasons
from hil.core.results import Outcome, Relation, format_node_counts

DType = Annotated[str, note("a name of numpy or ml_dtypes, or `string`")]
Shape = list[Count]
Index = list[Count] | None
Pair = Annotated[list[Any], Meta(min_length=2, max_length=2)] | None
RelationName = Annotated[Relation, note("components that a reference shares with the program (docs/references.md)")]


class StoredTensor(Record, kw_only=True):
    """A tensor in a file."""

    name: str
    dtype: DType
    shape: Shape
    file: Annotated[str, note(".npy file, relative to the directory of the run")]


class StoredTolerance(Record, kw_only=True):
    """An element passes if |a - b| <= atol + rtol * |b|, where b is the reference."""

    rtol: Annotated[float, Meta(ge=0)]
    atol: Annotated[float, Meta(ge=0)]


class StoredCriterion(Record, kw_only=True):
    """Result of a criterion."""

    criterion: Annotated[str, note("as given, such as `top1>=0.99`")]
    value: Annotated[Number, note("null if a function returned only a decision, or no value could be measured")]
    bound: Annotated[Number, note("null if a function decides")]
    passed: bool
    reason: Annotated[str, note("reason that the function returned, or empty")]


class StoredControl(Record, kw_only=True):
    """Bound of a declared arithmetic."""

    arithmetic: str
    source: Annotated[str, note("library that computed the model in the arithmetic, with its version")]
    factor: Annotated[float, note("permitted deviation, as a multiple of the deviation in the arithmetic")]
    rmse: Annotated[float, note("limit for all elements together")]
    max_abs: Annotated[float, note("limit for any element; channels and magnitudes have smaller limits")]
    jumping: Annotated[Count, note("elements that jump in the arithmetic")]


class StoredComparison(Record, kw_only=True):
    """Comparison of an output with a reference. docs/comparing.md describes the statistics."""

    name: str
    passed: bool
    reason: Annotated[str, note("failure in one line; empty for a pass")] = ""
    dtype: DType = ""
    shape: Shape = []
    reference_dtype: DType = ""
    reference_shape: Shape = []
    tolerance: Annotated[StoredTolerance | None, note("null requires exact equality")] = None
    blind: Annotated[bool, note("true if the output agrees, but wrong outputs would agree as well")] = False
    noise: Annotated[Number, note("largest difference that rounding of the reference explains; null: unknown")] = None
    unsteady: Annotated[Count | None, note("elements that jump through rounding; null: not measured")] = None
    flushed: Annotated[Count | None, note("zeros at subnormal reference values; null: not counted")] = None
    notes: Annotated[list[str], note("limits of a pass, such as a constant output")] = []
    control: Annotated[StoredControl | None, note("null: judged by tolerance or criteria")] = None
    criteria: Annotated[list[StoredCriterion], note("criteria that replace the tolerance, or empty")] = []
    elements: Annotated[Count | None, note("null, like all statistics, if the shapes differ")] = None
    mismatches: Count | None = None
    nonfinite: Annotated[Count | None, note("elements that are NaN or infinite in only one tensor")] = None
    masked: Annotated[
        Count | None,
        note("elements excluded from rmse, cosine and sqnr_db: above half of the dtype's maximum in both tensors"),
    ] = None
    max_abs: Number = None
    max_rel: Number = None
    max_ulp: Count | None = None
    mean_abs: Number = None
    rmse: Number = None
    cosine: Number = None
    sqnr_db: Number = None
    first_index: Annotated[Index, note("index of the first element out of tolerance")] = None
    first_values: Annotated[Pair, note("its value and the reference's")] = None
    worst_index: Annotated[Index, note("index of the element furthest out of tolerance")] = None
    worst_values: Annotated[Pair, note("its value and the reference's")] = None
    mismatch_share: Annotated[Number, note("fraction of elements out of tolerance")] = None


class StoredVerdict(Record, kw_only=True):
    """Verdict from one reference."""

    outcome: Annotated[Outcome, note("PASS, FAIL or BLIND")]
    relation: RelationName = Relation.INDEPENDENT
    against: Annotated[str, note("name of the reference")]
    reason: str
    outputs: list[StoredComparison]


class FailedReference(Record, kw_only=True):
    """A reference that gave no result."""

    reference: str
    outcome: str
    reason: str
    detail: str


class StoredPlacementReason(Record, kw_only=True):
    """Why nodes did not run on the requested device."""

    text: Annotated[str, note("message of the runtime or of its compiler")]
    nodes: Annotated[Count, note("number of nodes; 0 if unknown")] = 0
    names: Annotated[list[str], note("names of the nodes")] = []


class StoredPart(Record, kw_only=True):
    """Nodes of a program that ran on the same device."""

    device: Annotated[str, note("device, provider or delegate, as the runtime names it")]
    nodes: Annotated[Count, note("0 for the whole program; with ExecuTorch, the number of calls")] = 0
    names: Annotated[list[str], note("names of the nodes")] = []
    elsewhere: Annotated[bool, note("true if this is not the requested device")] = False
    reasons: Annotated[list[StoredPlacementReason], note("why not; empty if the runtime does not report a reason")] = []
    software: Annotated[str, note("name of a GPU that the CPU computes; its times are not GPU times")] = ""


Placement = Annotated[
    list[StoredPart] | None, note("devices that ran the program; null if the runtime does not report them")
]


def format_placement(placement: Placement) -> str:
    """Format the devices that ran a program, such as ``XnnpackBackend (1 node), portable (4 nodes)``."""
    return format_node_counts((_format_device(part), part.nodes) for part in placement or ())


def list_placement_reasons(placement: Placement | UnsetType, runtime: str) -> list[str]:
    """Return why nodes did not run on the requested device, a line per reason."""
    if placement is UNSET:
        return []
    return [
        line
        for part in placement or ()
        if part.elsewhere
        for line in format_reasons(
            ((one.text, one.nodes, one.names) for one in part.reasons), part.nodes, part.device, runtime
        )
    ]


def list_software_devices(placement: Placement | UnsetType) -> list[str]:
    """Return the names of the GPUs that the CPU computed."""
    return [] if placement is UNSET else [part.software for part in placement or () if part.software]


def note_software_devices(placement: Placement | UnsetType) -> list[str]:
    """Return a note about the times of each GPU that the CPU computed."""
    return [
        f"{part.device} is a software device ({part.software}): its times are not GPU times"
        for part in (() if placement is UNSET else placement or ())
        if part.software
    ]


def _format_device(part: StoredPart) -> str:
    return f"{part.device}, a software device: {part.software}" if part.software else part.device


class Origin(Record, kw_only=True):
    """Origin of a record."""

    labels: Annotated[list[str], note("from --label and HIL_LABELS")]
    branch: Annotated[str, note("of the git working tree, or empty")]
    commit: str


class ProfileDirectory(Record, kw_only=True):
    """A profile that was written."""

    kind: Annotated[str, note("`compile` or `run`")]
    folder: str
    notes: Annotated[list[str], note("data that could not be collected")]

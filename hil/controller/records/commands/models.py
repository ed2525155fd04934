"""Documents of commands for models, suites and traces: compile, compare, flows, layers, suite list, suite diff, ..."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType

from hil.controller.records.base import Count, Number, Record, note
from hil.controller.records.outputs import ProfileDirectory, StoredVerdict
from hil.controller.records.run import StoredSpec


class CompiledProgram(Record, kw_only=True):
    """Output of `hil compile`."""

    files: Annotated[list[str], note("written files, the program first")]
    bytes: Count
    compiler: str
    flags: list[str]
    cached: bool
    seconds: float
    profiles: list[ProfileDirectory]
    exit_code: Literal[0]


class CompareResult(Record, kw_only=True):
    """Output of `hil compare`."""

    verdicts: Annotated[dict[str, StoredVerdict], note("verdict by case; `output` for .npy files")]
    plot: Annotated[str | None, note("file, if a plot was written")]
    exit_code: int


class FlowSettings(Record, kw_only=True):
    """A flow."""

    name: str
    runtime: str
    device: Annotated[str, note("empty: the board's device")]
    compiler: Annotated[str, note("empty: the default of the runtime")]
    compile_flags: list[str]
    recipe: str
    settings: dict[str, Any]
    references: Annotated[list[str], note("empty: the default for the format of the model")]
    accept: list[str]
    rtol: float | None
    atol: float | None
    quanta: float | None
    min_sqnr_db: float | None
    arithmetic: str
    description: str


class BrokenFlow(Record, kw_only=True):
    """A flow that cannot be used."""

    name: str
    error: str


class FlowList(Record, kw_only=True):
    """Output of `hil flows`."""

    flows: list[FlowSettings]
    broken: list[BrokenFlow] | UnsetType = UNSET


class LayerFiles(Record, kw_only=True):
    """Files of a saved layer."""

    model: str
    inputs: list[str]
    outputs: list[str]
    run: Annotated[str, note("command that runs the layer")]


class LayerDescription(Record, kw_only=True):
    """A layer of a model."""

    name: str
    op: str
    nodes: list[str]
    path: str
    inputs: list[StoredSpec]
    outputs: list[StoredSpec]
    depth: Count
    same_as: Annotated[str, note("earlier layer with equal operators, attributes and shapes, or empty")]
    copy_of: Annotated[str, note("earlier layer with equal weights and inputs as well, or empty")]
    by_chance: Annotated[bool, note("true if the layer generates random numbers, so that runs differ")]
    folded: Annotated[bool, note("true if the layer has constants that onnx's evaluator computed")]
    saved: Annotated[LayerFiles | UnsetType, note("with --save")] = UNSET


class LayerList(Record, kw_only=True):
    """Output of `hil layers`."""

    model: str
    layers: list[LayerDescription]
    exit_code: Literal[0]


class ListedCase(Record, kw_only=True):
    """A case of a suite."""

    id: str
    model: str
    layer: str
    op: str


class CaseList(Record, kw_only=True):
    """Output of `hil suite list`."""

    suite: str
    cases: list[ListedCase]
    exit_code: Annotated[int, note("0, or 5 without cases")]


class OutcomeChange(Record):
    """A case with a listed outcome, or a case in only one run."""

    id: str
    before: Annotated[str, note("outcome without expectations, or `absent`, `not run`")]
    after: str
    message: Annotated[str, note("from the later run, if it has the case")]
    repeat: Annotated[str, note("command that repeats the case")]


class DiffedNumber(Record, kw_only=True):
    """A number of a case that changed by more than noise.

    Device times are compared if both runs timed enough iterations, and the slower median exceeds 90 % of the faster
    run's times.
    """

    id: str
    what: Annotated[str, note("`device_p50_ns`, `artifact_bytes`, `max_abs` or `sqnr_db`")]
    before: Number
    after: Number
    ratio: Annotated[Number, note("after/before; null for SQNR (a logarithm), and if `before` is 0")]
    worse: Annotated[bool, note("true if slower, larger, or further from the reference")]
    cases: Annotated[int, note("cases that share this program; `id` is the first")]
    output: Annotated[str, note("output with the largest change; worse outputs take priority")]


class DiffedRun(Record, kw_only=True):
    """A suite run of a comparison."""

    folder: str
    cases: Annotated[Count, note("number of finished cases")]
    id: str
    suite: str
    flow: str
    runtime: str
    boards: list[str]
    started: float | None
    finished: float | None
    exit_code: int | None
    versions: dict[str, str]


class SuiteDiff(Record, kw_only=True):
    """Output of `hil suite diff`."""

    before: DiffedRun
    after: DiffedRun
    notes: Annotated[list[str], note("other differences: flow, boards, versions, cases that did not run")]
    counts: Annotated[dict[str, Count], note("lengths of the following lists")]
    broke: Annotated[list[OutcomeChange], note("passed before, fails now, expected or not")]
    fixed: list[OutcomeChange]
    still_failing: list[OutcomeChange]
    new: Annotated[list[OutcomeChange], note("only in the later run; failing cases first")]
    gone: Annotated[list[OutcomeChange], note("only in the earlier run")]
    changed: Annotated[list[DiffedNumber], note("the largest change of each kind first")]
    device_ratio: Annotated[Number, note("geometric mean of after/before; null without measured cases")]
    device_cases: Count
    device_few: Annotated[Count, note("cases without enough timed iterations for a comparison, or with grade F")]
    exit_code: Annotated[int, note("1 if a case broke or a new case fails, otherwise 0")]

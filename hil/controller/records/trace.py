"""Records of traces: comparison.json, and the documents of `hil trace compare` and `hil trace show`."""

from __future__ import annotations

from typing import Annotated, Literal

from hil.controller.records.base import Count, Record, Timestamp, note
from hil.controller.records.outputs import StoredVerdict
from hil.core.results import Outcome

TensorTypes = Annotated[dict[str, str], note("path -> type, such as `4x3 float32`")]


class ComparedCall(Record, kw_only=True):
    """Comparison of a call with the reference's call."""

    call: Annotated[Count, note("number of the call, from 0")]
    method: str
    outcome: Annotated[Outcome, note("PASS, FAIL or BLIND")]
    reason: Annotated[str, note("mismatch in the call itself, or empty; the verdict describes mismatches of outputs")]
    verdict: Annotated[StoredVerdict | None, note("null if the call has no outputs")]


class ComparedTrace(Record, kw_only=True):
    """Comparison of a trace with the reference's trace."""

    name: str
    outcome: Annotated[Outcome, note("PASS, FAIL or BLIND")]
    reason: Annotated[str, note("reason in one line; empty for a pass")]
    calls: list[ComparedCall]


class StoredTraceComparison(ComparedTrace, kw_only=True):
    """Comparison in the directory of a trace: comparison.json."""

    schema: Literal[1]
    trace_created: Annotated[Timestamp, note("time of the trace; the comparison does not apply to a newer trace")]


class TraceComparisonDocument(Record, kw_only=True):
    """Comparisons as `hil trace compare --json` prints them."""

    traces: list[ComparedTrace]
    exit_code: int


class ShownProgram(Record, kw_only=True):
    """Program of a call."""

    model: str
    function: str
    runtime: str
    captured: list[str]


class ShownCall(Record, kw_only=True):
    """Call of a trace."""

    method: str
    rtol: float | None
    atol: float | None
    inputs: TensorTypes
    outputs: TensorTypes
    assigned: TensorTypes
    program: ShownProgram | None


class TraceDocument(Record, kw_only=True):
    """A trace as `hil trace show --json` prints it."""

    folder: str
    module: str
    backend: str
    name: str
    ran_by: str
    reference: Annotated[str, note("trace that it was compared with, or empty")]
    error: str
    calls: list[ShownCall]
    exit_code: Literal[0] = 0

"""Records of a reduction: reduce.json of `hil reduce`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from hil.controller.records.base import Count, Record, note
from hil.controller.records.console import StoredConsole
from hil.controller.records.outputs import Origin
from hil.core.results import Outcome


class ReduceTrial(Record, kw_only=True):
    """Run of the model or of a smaller model."""

    key: Annotated[str, note("identifies the model, so that a resumed reduction does not run it again")]
    text: Annotated[str, note("what was removed or changed")]
    nodes: Count
    outcome: Outcome
    reason: str
    same: Annotated[bool, note("whether the model fails in the same way as the whole model")]
    seconds: float
    time_ns: Annotated[float | None, note("shortest iteration on the device; null if not measured")] = None


class ReduceFailure(Record, kw_only=True):
    """Failure of the whole model."""

    outcome: Outcome
    stage: str
    reason: str
    kind: Annotated[str, note("what all smaller models must have in common: kind of difference, or error message")]
    sqnr_db: Annotated[float | None, note("lowest signal-to-noise ratio of the wrong outputs; null if not defined")]
    time_ns: Annotated[float | None, note("shortest iteration of the whole model; null without --slow")] = None


class ReduceRecord(Record, kw_only=True):
    """Record of a reduction, and the journal while it runs."""

    schema: Literal[1]
    id: str
    created: Annotated[float, note("seconds since the epoch")]
    origin: Origin | None = None
    command: Annotated[str, note("command that repeats the reduction; empty if not started from a command line")] = ""
    request: Annotated[dict[str, Any], note("options, for --resume")]
    model: str
    model_digest: str = ""
    board: str = ""
    hw_type: str = ""
    runtime: str = ""
    max_runs: Count
    slow: Annotated[float | None, note("share of the time that smaller models must take; null without --slow")] = None
    failure: ReduceFailure | None = None
    nodes_before: Count = 0
    nodes_after: Count = 0
    operators: Annotated[list[str], note("operators of the smallest model, in order")] = []
    trials: list[ReduceTrial] = []
    notes: list[str] = []
    consoles: Annotated[list[StoredConsole], note("consoles of the boards")] = []
    stock: Annotated[str, note("command that reproduces the failure without hil; empty if there is none")] = ""
    finished: bool = False
    exit_code: int | None = None
    folder: Annotated[str, note("directory with the smallest model, its tensors, report.md and a bundle")] = ""

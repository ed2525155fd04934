"""Record of a profile: profile.json of `hil run --profile`. The rows are in a table next to it."""

from __future__ import annotations

from typing import Annotated, Literal

from hil.controller.records.base import Count, Record, note
from hil.core.clock import ClockFit
from hil.core.timeline import InvokeTiming, Span, Ticks


class StoredSample(Record, kw_only=True):
    """Counter value at a time on the board's clock."""

    at_ns: int
    name: str
    value: float | Literal["inf", "-inf", "nan"]
    unit: str


class ProfileHead(Record, kw_only=True):
    """A profile without rows. Times are in nanoseconds."""

    schema: Literal[1]
    run: str
    model: str
    board: str
    runtime: Annotated[str, note("name, version and device")]
    rows: Annotated[Count, note("number of rows in ops.csv")]
    stages: Annotated[list[Span], note("stages on the host's clock")]
    transfers: Annotated[list[Span], note("data transfers on the host's clock")]
    calls: list[InvokeTiming]
    counters: list[StoredSample]
    clock: Annotated[ClockFit, note("board's clock relative to the host's")]
    console: Annotated[list[Span], note("lines of the board's console on the host's clock")] = []
    notes: Annotated[list[str], note("errors and missing data")]
    energy: Annotated[list[str], note("measured energies and powers of the program, as text")] = []
    device: Annotated[str, note("device whose clock timed the rows; empty if the CPU's clock timed them")] = ""
    ticks: Annotated[
        Ticks | None, note("of an emulated board, whose clock counts instructions: the profile then has no rows")
    ] = None
    stack: Annotated[dict[str, str], note("part of the board's stack -> version; empty if unknown")] = {}
    flags: Annotated[list[str], note("flags of the compiler; empty in profiles of earlier versions")] = []

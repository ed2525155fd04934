"""Types for profiles, shared by the collector, writers and readers.

All times are whole nanoseconds. ``board`` times use the board's monotonic clock. ``host`` times use the controller's
clock. :class:`hil.core.clock.ClockFit` converts between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hil.core.clock import ClockFit


@dataclass(frozen=True)
class OpRow:
    """Execution of an operation, such as an IREE dispatch or an ONNX Runtime node.

    CSV files and traces have the same fields.
    """

    run: str  # the profile's name, the same in all rows
    iteration: int
    board: str
    runtime: str
    op: str
    # ``compute``: an operation of the model; ``runtime``: overhead such as allocating and copying.
    kind: str
    # Names of the ONNX nodes that the operation computes, completely or in part; empty for other operations.
    onnx_nodes: tuple[str, ...]
    op_types: tuple[str, ...]
    # start_ns, duration_ns: on the clock named in ``clock``, which is ``board`` (see above).
    start_ns: int
    duration_ns: int
    clock: str = "board"
    tiles: int | None = None  # workgroup count; None if the runtime does not report it
    tile_time_ns: int | None = None  # total time over all tiles; exceeds ``duration_ns`` with multiple threads
    shapes: str = ""  # inputs and outputs, as ``1x64x56x56xf32, 64x3x3xf32 -> 1x64x56x56xf32``; "" if unknown
    bytes: int | None = None  # estimated minimum number of bytes read and written; None if unknown
    flops: int | None = None  # estimated floating-point or integer operations; None if unknown
    # Expected bottleneck, ``compute`` or ``memory``; "" if unknown. hil compares the operations per byte with a fixed
    # limit (a roofline ridge).
    bound_estimate: str = ""


@dataclass(frozen=True)
class OpTicks:
    """Ticks of an operation on an emulated board: counts, not times."""

    name: str
    kind: str  # as in :class:`OpRow`
    onnx_nodes: tuple[str, ...]
    op_types: tuple[str, ...]
    calls: int  # executions in a run
    # p50, minimum, maximum: ticks in a run
    p50: float
    minimum: int
    maximum: int
    share: float  # p50 divided by the sum over all operations
    # shapes, bytes, flops: as in :class:`OpRow`, for one call
    shapes: str = ""
    bytes: int | None = None
    flops: int | None = None


@dataclass(frozen=True)
class Ticks:
    """Ticks of all operations of a program."""

    iterations: int
    instructions_per_tick: float
    p50: float  # ticks of a run, without gaps between the operations
    operations: tuple[OpTicks, ...]  # in the order of execution


@dataclass(frozen=True)
class Span:
    """Time span. The field that contains the span determines the clock."""

    name: str
    start_ns: int
    end_ns: int
    args: Mapping[str, str | int | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """Counter value at a board time: ``cpu0 busy`` in ``%``, ``memory available`` in ``bytes``."""

    at_ns: int
    name: str
    value: float
    unit: str


@dataclass(frozen=True)
class InvokeTiming:
    """Times of an invoke request, by the clocks of host and board."""

    kind: str  # ``timed``: the run with compared outputs; ``profiled``: the separate pass that produced the rows
    host: Span  # from sending to the last received byte, host clock
    board: Span  # from the last input byte to ready outputs, board clock
    warmup_ns: int = 0  # time before the first iteration
    # (start, end) of each iteration, board clock; empty if the pass reports only rows.
    iterations_ns: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Profile:
    """Complete profile of a model on a board."""

    run: str
    # model, board, runtime: names; ``runtime`` includes version and device.
    model: str
    board: str
    runtime: str
    rows: Sequence[OpRow]  # ordered by start
    stages: Sequence[Span]  # controller stages, host clock
    transfers: Sequence[Span]  # data transfers over the link, host clock, with ``bytes_out`` and ``bytes_in`` in args
    calls: Sequence[InvokeTiming]  # timed call and profiled calls, in order
    counters: Sequence[Sample]
    clock: ClockFit  # board clock relative to the host's, over the whole profile
    console: Sequence[Span] = ()  # lines of the board's console, host clock
    notes: Sequence[str] = ()  # errors and missing data, a line each: profile errors never fail the run
    device: str = ""  # device whose clock timed the rows, such as ``vulkan``; "" if the CPU's clock timed them
    ticks: Ticks | None = None  # instead of rows, if the board's clock counts instructions
    energy: Sequence[str] = ()  # measured energies and powers, a text each
    stack: Mapping[str, str] = field(default_factory=dict)  # part of the board's stack -> version; "" if unknown
    flags: Sequence[str] = ()  # of the compiler

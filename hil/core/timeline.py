"""What a profile holds: the words that its collector, its writers and its readers share.

All times are whole nanoseconds. ``board`` times are of the board's monotonic clock, the one that the agent stamps with;
``host`` times are of the controller's. :class:`hil.core.clock.ClockFit` leads from the one to the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hil.core.clock import ClockFit


@dataclass(frozen=True)
class OpRow:
    """One execution of one operation, as CSV and trace have it: a dispatch of IREE's, a node of ONNX Runtime's."""

    run: str  # the profile's name, the same in all its rows
    iteration: int
    board: str
    runtime: str
    op: str
    # ``compute``: an operation of the model; ``runtime``: what the runtime does besides (allocating, copying).
    kind: str
    # names of the ONNX nodes that it computes, or a part of; empty where it is no compute operation.
    onnx_nodes: tuple[str, ...]
    op_types: tuple[str, ...]
    # start_ns, duration_ns: by the clock named in ``clock``, which is ``board`` (see above).
    start_ns: int
    duration_ns: int
    clock: str = "board"
    tiles: int | None = None  # workgroups that it was cut into; None where the runtime does not tell
    tile_time_ns: int | None = None  # what all tiles took together: above ``duration_ns`` where several threads worked
    shapes: str = ""  # of inputs and outputs, as ``1x64x56x56xf32, 64x3x3xf32 -> 1x64x56x56xf32``; "" where unknown
    bytes: int | None = None  # estimate of what it reads and writes at the least; None where unknown
    flops: int | None = None  # estimate of its floating-point (or integer) operations; None where unknown
    # ``compute`` or ``memory``: what, by these two and the estimates' stated ridge, should limit it; "" where unknown.
    bound_estimate: str = ""


@dataclass(frozen=True)
class Span:
    """Something that took time. Whose clock it is told by where the span stands."""

    name: str
    start_ns: int
    end_ns: int
    args: Mapping[str, str | int | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """A counter's value at a moment of the board's clock: ``cpu0 busy`` in ``%``, ``memory available`` in ``bytes``."""

    at_ns: int
    name: str
    value: float
    unit: str


@dataclass(frozen=True)
class Call:
    """One Invoke, seen from both sides."""

    kind: str  # ``timed``: the run whose answer is compared; ``profiled``: the pass of its own that the rows come from
    host: Span  # from sending to the last byte received, host clock
    board: Span  # from the last input byte to the outputs being ready, board clock
    warmup_ns: int = 0  # what came before the first iteration
    # (start, end) of each, board clock; empty where the pass tells it by its rows only.
    iterations_ns: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Profile:
    """All that a profile knows of one model on one board."""

    run: str
    # model, board, runtime: what ran where; ``runtime`` with version and device.
    model: str
    board: str
    runtime: str
    rows: Sequence[OpRow]  # in the order of their start
    stages: Sequence[Span]  # the controller's, host clock
    transfers: Sequence[Span]  # what went over the link, host clock, with ``bytes_out`` and ``bytes_in`` among the args
    calls: Sequence[Call]  # the timed one and the profiled ones, in order
    counters: Sequence[Sample]
    clock: ClockFit  # the board's clock beside the host's, over the whole profile
    notes: Sequence[str] = ()  # what went wrong or could not be had, a line each: a profile is never the run's loss

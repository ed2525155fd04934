"""Define the static schedule of a program: fills, copies and dispatches on buffers with fixed addresses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hil.core.tensors import TensorSpec

MAX_STEPS = 65_535


@dataclass(eq=False)
class Buffer:
    """Memory with a fixed address. ``data`` is the content of a constant."""

    kind: str  # input, constant, state or transient
    size: int
    data: bytes = b""
    first: int = 0  # number of the step after which the buffer is in use
    last: int | None = None  # number of the step before which it is free again; None: never
    offset: int = 0  # offset in the arena


@dataclass(frozen=True)
class BufferRange:
    """Range of a buffer, in bytes."""

    buffer: Buffer
    offset: int
    length: int


@dataclass(frozen=True)
class Fill:
    """Fill a range with a repeated pattern of 1 to 4 bytes."""

    target: BufferRange
    pattern: bytes


@dataclass(frozen=True)
class CopyStep:
    """Copy between two ranges of the same length."""

    target: BufferRange
    source: BufferRange


@dataclass(frozen=True)
class DispatchStep:
    """Call of a function of the static library for every workgroup."""

    function: str
    counts: tuple[int, int, int]
    constants: tuple[int, ...]
    bindings: tuple[BufferRange, ...]


Step = Fill | CopyStep | DispatchStep


@dataclass
class Schedule:
    """Static schedule of a function."""

    inputs: list[BufferRange]
    outputs: list[BufferRange]
    initial: list[Step]  # at start, and before each run if the program has state
    steps: list[Step]
    specs: tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]
    constants: list[Buffer] = field(default_factory=list)
    state: list[Buffer] = field(default_factory=list)
    arena: int = 0  # bytes for transient buffers


def list_spans(step: Step) -> Iterator[BufferRange]:
    """Yield the ranges that a step reads or writes."""
    if isinstance(step, DispatchStep):
        yield from step.bindings
    else:
        yield step.target
        if isinstance(step, CopyStep):
            yield step.source


def place_buffers(buffers: list[Buffer], alignment: int = 64) -> int:
    """Set the offsets of transient buffers and return the size. Buffers in use at the same time do not overlap."""

    def get_end(buffer: Buffer) -> float:
        return float("inf") if buffer.last is None else buffer.last

    placed: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda one: -one.size):
        meanwhile = [one for one in placed if one.first < get_end(buffer) and buffer.first < get_end(one)]
        offset = 0
        for one in sorted(meanwhile, key=lambda one: one.offset):
            if offset + buffer.size <= one.offset:
                break
            offset = max(offset, -(-(one.offset + one.size) // alignment) * alignment)
        buffer.offset = offset
        placed.append(buffer)
    return max((one.offset + one.size for one in placed), default=0)

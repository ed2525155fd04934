"""What is known of programs that are run by command, and of their calls."""

from __future__ import annotations

from dataclasses import dataclass

from hil.tensors import TensorSpec

# What a run by command cannot tell; a result says so.
NOT_MEASURED = ("device time", "peak memory", "clock")


@dataclass(frozen=True)
class CommandLoaded:
    """What is known of a program that the board has: a command loads it anew each time."""

    function: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class CommandCall:
    """What a call cost, on the host's clock: nanoseconds of warm-up runs, seconds of fetching the outputs."""

    warmup_ns: int
    fetch_s: float

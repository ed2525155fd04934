"""What is known of programs that are run by command, and of their calls."""

from __future__ import annotations

from dataclasses import dataclass

from hil.core.tensors import TensorSpec

# What a run by command cannot tell, and what it tells only where IREE's timing tool can be put beside it.
NOT_MEASURED = ("peak memory", "clock")
DEVICE_TIME = "device time"


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

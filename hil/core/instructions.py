"""Instruction counts of a program's iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Counter of an emulated board: its clock counts the instructions of the whole board.
ICOUNT = "icount"
# Counters of an agent: the kernel's perf_event counts the user-space instructions of the worker, a runtime reports the
# instructions of its device, or a simulated board invents them.
PERF_EVENT, RUNTIME, SIMULATED = AGENT_COUNTERS = ("perf_event", "runtime", "simulated")


@dataclass(frozen=True)
class InstructionCounts:
    """Instructions of each timed iteration, or why the board did not count them."""

    counter: str = ""  # ``icount`` or one of AGENT_COUNTERS; "" if not counted
    counts: tuple[int, ...] = ()
    problem: str = ""  # why the board did not count; "" if it did


def count_clock(iterations_ns: Sequence[tuple[int, int]], shift: int) -> InstructionCounts:
    """Return the counts from a clock on which an instruction takes ``2**shift`` nanoseconds."""
    counts = tuple((end - start) >> shift for start, end in iterations_ns)
    if min(counts, default=0) < 1:
        return InstructionCounts(problem="the board's clock does not count each iteration: check [board] icount_shift")
    return InstructionCounts(ICOUNT, counts)


def merge_counts(one: InstructionCounts | None, other: InstructionCounts | None) -> InstructionCounts | None:
    """Return the counts of two runs in order. If the board did not count one of them, the result has no counts."""
    if one is None or other is None or one.problem:
        return one
    if other.problem:
        return other
    return InstructionCounts(one.counter, (*one.counts, *other.counts))

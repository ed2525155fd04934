"""Count the instructions of two programs, and compare the counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hil.controller.analysis.bench.measure import BenchSide, count_batches, count_instructions
from hil.controller.devices.board import Board
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.instructions import compare_counts, summarise_counts
from hil.controller.records.measurements.instructions import InstructionComparison
from hil.errors import RunFailed

# Iterations per load, and loads: the memory layout of a process can change the count.
_ITERATIONS, _LOADS = 10, 5


def count_again(cases: Sequence[Case], board: Board) -> InstructionComparison:
    """Count a few iterations of two programs.

    Raises:
        RunFailed: the board did not count, or a program failed.
        BoardError: the board failed.
    """
    sides = [
        BenchSide(label, replace(case, options=replace(case.options, instructions=True)), board)
        for label, case in zip("AB", cases, strict=True)
    ]
    count_instructions(sides, loads=_LOADS, iterations=_ITERATIONS)
    found = [summarise_counts(count_batches(side, side.batches)) for side in sides]
    compared = compare_counts(*found)
    if compared is None:
        problem = next((one.problem for one in found if one is not None and one.problem), "different counters")
        raise RunFailed(f"instructions not counted: {problem}")
    return compared

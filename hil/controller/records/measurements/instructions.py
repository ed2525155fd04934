"""Records of instruction counts. A count is not a time."""

from __future__ import annotations

from typing import Annotated, Literal

from hil.controller.records.base import Count, Record, note

InstructionVerdict = Literal["equal", "more", "fewer", "unclear"]


class InstructionStatistics(Record, kw_only=True):
    """Instructions of the timed iterations, or why they were not counted."""

    counter: Annotated[
        str,
        note(
            "`perf_event`: user-space instructions of the program's process; `icount`: instructions of the emulated "
            "board; `runtime`: reported by the runtime; `simulated`: of a simulated board; empty if not counted"
        ),
    ]
    iterations: Count = 0
    median: Annotated[float | None, note("null if not counted")] = None
    min: Count | None = None
    max: Count | None = None
    spread: Annotated[float | None, note("interquartile range divided by the median")] = None
    problem: Annotated[str, note("why the board did not count; empty if it did")] = ""


class InstructionComparison(Record, kw_only=True):
    """Comparison of the instructions of B with those of A."""

    ratio: Annotated[float, note("B's median divided by A's")]
    min_effect: Annotated[float, note("the smallest relative difference to report")]
    verdict: Annotated[
        InstructionVerdict, note("B compared with A; `unclear` if the counts vary by more than the difference")
    ]
    spread: Annotated[float, note("larger interquartile range of the two programs, divided by the median")] = 0.0
    reason: Annotated[str, note("why the verdict is unclear; otherwise empty")] = ""

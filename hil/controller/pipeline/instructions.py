"""Statistics of instruction counts, and their comparison.

Counts have no noise from other programs, temperatures or clocks, so a small difference is real. Exception: threads that
wait in a loop execute instructions while they wait. Differences within the spread of the counts are therefore unclear.
"""

from __future__ import annotations

import numpy as np

from hil.controller.records.measurements.instructions import (
    InstructionComparison,
    InstructionStatistics,
    InstructionVerdict,
)
from hil.core.instructions import ICOUNT, PERF_EVENT, RUNTIME, SIMULATED, InstructionCounts

# The smallest relative difference to report.
MIN_EFFECT = 0.001
# Counter -> what it counts.
_COUNTED = {
    PERF_EVENT: "user space",
    ICOUNT: "whole emulated board",
    RUNTIME: "reported by the runtime",
    SIMULATED: "simulated",
}


def summarise_counts(found: InstructionCounts | None, *, cold: bool = False) -> InstructionStatistics | None:
    """Return the statistics of counts; None if they were not requested.

    Args:
        cold: leave out the first iteration, unless there are no others.
    """
    if found is None:
        return None
    if found.problem or not found.counts:
        return InstructionStatistics(counter="", problem=found.problem or "nothing was measured")
    counts = np.array(found.counts[1:] if cold and len(found.counts) > 1 else found.counts, np.int64)
    low, median, high = (float(value) for value in np.percentile(counts, (25, 50, 75)))
    return InstructionStatistics(
        counter=found.counter,
        iterations=int(counts.size),
        median=median,
        min=int(counts.min()),
        max=int(counts.max()),
        spread=(high - low) / median,
    )


def compare_counts(
    old: InstructionStatistics | None, new: InstructionStatistics | None
) -> InstructionComparison | None:
    """Compare the counts of two programs; None unless the same kind of counter counted both."""
    if old is None or new is None or not old.median or not new.median or old.counter != new.counter:
        return None
    ratio = new.median / old.median
    verdict: InstructionVerdict = "more" if ratio > 1 else "fewer"
    spread, reason = max(old.spread or 0.0, new.spread or 0.0), ""
    if abs(ratio - 1) <= MIN_EFFECT:
        verdict = "equal"
    elif abs(ratio - 1) <= spread:
        verdict, reason = "unclear", f"the counts of one program vary by {spread:.2%}"
    return InstructionComparison(ratio=ratio, min_effect=MIN_EFFECT, verdict=verdict, spread=spread, reason=reason)


def format_counts(found: InstructionStatistics) -> str:
    """Return statistics in one line: ``1,234 (min 1,230, max 1,250; user space)``, or ``not counted: REASON``."""
    if found.median is None:
        return f"not counted: {found.problem}"
    return f"{found.median:,.0f} (min {found.min:,}, max {found.max:,}; {_COUNTED.get(found.counter, found.counter)})"


def describe_change(found: InstructionComparison) -> str:
    """Return the change in one line: ``+1.20 % instructions``."""
    return f"{100 * (found.ratio - 1):+.2f} % instructions"

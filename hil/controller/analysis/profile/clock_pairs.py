"""One clock's times from another's, where both were read at the same moments."""

from __future__ import annotations

from collections.abc import Sequence


def mapped(time_ns: int, clock: Sequence[tuple[int, int]]) -> int:
    """Another clock's time, by the line through the first and the last of pairs of (time, the other clock's time).

    Args:
        time_ns: a moment, nanoseconds.
        clock: the pairs, in order; of one alone, or of two of which one clock stood still or was set back, both are
            taken to run alike; none: they are the same clock.
    """
    if not clock:
        return time_ns
    (first, other_first), (last, other_last) = clock[0], clock[-1]
    elapsed = time_ns - first
    if last <= first or other_last <= other_first:
        return other_first + elapsed
    # Whole numbers: a float64 of a clock that has run for months is some nanoseconds off.
    return other_first + elapsed * (other_last - other_first) // (last - first)

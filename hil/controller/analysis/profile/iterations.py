"""Which run an event belongs to, where a profile holds several runs of a program one after the other.

What is handed to a device's queue at once, a submission, has a number, counted up. All runs have the same inputs and
so the same submissions, in the same order, however their loops and branches went; before them may be others: warm-up,
initialisation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SETUP = -1


def by_repetition(kinds: NDArray[np.int64], iterations: int | None) -> tuple[NDArray[np.int64], str]:
    """The iteration of each submission by what is repeated.

    The last submissions are ``iterations`` equal sequences, the longest that there are; without a number, as many as
    the shortest sequence that makes up all of them.

    Args:
        kinds: [submissions] of int64: equal numbers for submissions that do the same, in the order of submission.
        iterations: how many runs there are, where that is known.

    Returns:
        [submissions] of int64, :data:`SETUP` for those before the first; and what is uncertain of it, or "".
    """
    count = len(kinds)
    alike = _alike(kinds[::-1].tolist())
    if iterations is None:
        period = next((p for p in range(1, count) if count % p == 0 and alike[p] == count - p), count)
        doubt = f"how many runs there were was not told: {count // period} by what is repeated" if count else ""
        return np.arange(count) // max(period, 1), doubt
    for period in range(count // iterations, 0, -1):
        if iterations == 1 or alike[period] >= period * (iterations - 1):
            tail = period * iterations
            setup = np.full(count - tail, SETUP)
            return np.concatenate([setup, np.arange(tail) // period]), ""
    if count and count % iterations == 0:
        doubt = "the runs do not do the same: they were told apart by counting alone"
        return np.arange(count) // (count // iterations), doubt
    return np.zeros(count, np.int64), f"{iterations} runs cannot be told apart: all is told as one"


def _alike(kinds: Sequence[int]) -> list[int]:
    """How many of the first elements come again, in order, from each place on: the Z function, in linear time."""
    found = [0] * len(kinds)
    begin = end = 0
    for at in range(1, len(kinds)):
        length = min(found[at - begin], end - at) if at < end else 0
        while at + length < len(kinds) and kinds[length] == kinds[at + length]:
            length += 1
        found[at] = length
        if at + length > end:
            begin, end = at, at + length
    return found

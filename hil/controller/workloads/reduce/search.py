"""Search for a small set of items that still fails. Pure functions, which call a test.

A test gets item numbers in ascending order, and returns True if the same failure occurs. Tests may be expensive, so
each function tests a set at most once. A test raises an exception to stop the search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

Items = tuple[int, ...]
Fails = Callable[[Items], bool]


def find_window(count: int, fails: Fails) -> Items:
    """Return a range of consecutive items that fails. All ``count`` items together are known to fail.

    The search finds the shortest failing prefix by bisection, then the shortest failing suffix of the prefix. It
    assumes that a set with more items also fails. If there is a single faulty item, the result is this item, after
    about log2(count) + 1 tests.
    """
    low, end = 0, count  # the prefix of ``end`` items fails
    while end - low > 1:
        middle = (low + end) // 2
        if fails(tuple(range(middle))):
            end = middle
        else:
            low = middle
    # Try short suffixes first, because a single faulty item is the last item of the prefix.
    passed, width = 0, 1
    while width < end and not fails(tuple(range(end - width, end))):
        passed, width = width, width * 2
    width = min(width, end)
    while width - passed > 1:
        middle = (passed + width) // 2
        if fails(tuple(range(end - middle, end))):
            width = middle
        else:
            passed = middle
    return tuple(range(end - width, end))


def minimise(items: Sequence[int], fails: Fails) -> Items:
    """Return a 1-minimal failing subset: if any one item is removed, the remaining items do not fail.

    Source: ddmin, A. Zeller and R. Hildebrandt, Simplifying and Isolating Failure-Inducing Input, IEEE TSE 28 (2002).
    """
    known: dict[Items, bool] = {}

    def test(chosen: Items) -> bool:
        if chosen not in known:
            known[chosen] = bool(chosen) and fails(chosen)
        return known[chosen]

    kept = tuple(items)
    parts = 2
    while len(kept) > 1:
        chunks = _split(kept, parts)
        rests = [tuple(item for item in kept if item not in set(chunk)) for chunk in chunks]
        if smaller := next((chunk for chunk in chunks if test(chunk)), None):
            kept, parts = smaller, 2
        elif smaller := next((rest for rest in rests if test(rest)), None):
            kept, parts = smaller, max(parts - 1, 2)
        elif parts == len(kept):
            break
        else:
            parts = min(2 * parts, len(kept))
    return kept


def _split(items: Items, parts: int) -> list[Items]:
    edges = [len(items) * number // parts for number in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(edges)]

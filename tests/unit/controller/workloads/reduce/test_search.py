"""Delta debugging with a function instead of a board."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from hil.controller.workloads.reduce.search import Items, find_window, minimise


class Oracle:
    """Test that counts its calls, and fails for sets that contain all causes."""

    def __init__(self, *causes: int) -> None:
        self.causes = set(causes)
        self.calls = 0

    def __call__(self, chosen: Items) -> bool:
        assert list(chosen) == sorted(set(chosen))
        self.calls += 1
        return self.causes <= set(chosen)


@given(st.integers(1, 1200), st.data())
@settings(max_examples=60, deadline=None)
def test_find_window_finds_single_cause_in_log_tests(count, data):
    oracle = Oracle(data.draw(st.integers(0, count - 1)))
    assert find_window(count, oracle) == tuple(oracle.causes)
    assert oracle.calls <= math.ceil(math.log2(count)) + 1


@given(st.sets(st.integers(0, 199), min_size=2, max_size=4))
@settings(max_examples=60, deadline=None)
def test_find_window_spans_all_causes(causes):
    window = find_window(200, Oracle(*causes))
    assert window == tuple(range(min(causes), max(causes) + 1))


@given(st.sets(st.integers(0, 63), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_minimise_finds_exactly_the_causes(causes):
    assert minimise(range(64), Oracle(*causes)) == tuple(sorted(causes))


@given(st.lists(st.sets(st.integers(0, 9)), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_minimise_is_1_minimal_for_any_test(failing):
    known = {tuple(sorted(one)) for one in failing} | {tuple(range(10))}
    kept = minimise(range(10), lambda chosen: chosen in known)
    assert kept in known
    assert not any(tuple(item for item in kept if item != left) in known - {()} for left in kept)


def test_minimise_tests_each_set_once():
    seen: list[Items] = []

    def fails(chosen: Items) -> bool:
        seen.append(chosen)
        return {3, 12} <= set(chosen)

    assert minimise(range(16), fails) == (3, 12)
    assert len(seen) == len(set(seen))

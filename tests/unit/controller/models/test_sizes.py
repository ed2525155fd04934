"""Sizes tried for a range, and the search for the smallest failing size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hil.controller.models.sizing.sizes import (
    MAX_SIZES,
    choose_next_combination,
    choose_next_size,
    find_smallest_failing,
    list_edge_sizes,
    parse_range,
    sweep,
)


@pytest.mark.parametrize(("text", "ends"), [("1..512", (1, 512)), ("0..0", (0, 0)), ("7..8", (7, 8))])
def test_parse_range_reads_both_ends(text, ends):
    assert parse_range(text) == ends


@pytest.mark.parametrize("text", ["", "1", "1..", "..2", "2..1", "-1..2", "1...2", "1..2..3", "1.5..2", "a..b"])
def test_parse_range_rejects_invalid_text(text):
    with pytest.raises(ValueError):
        parse_range(text)


@pytest.mark.parametrize(
    ("low", "high", "sizes"),
    [
        (1, 512, [1, 2, 15, 16, 17, 63, 64, 65, 128, 129, 511, 512]),
        (1, 1, [1]),
        (3, 7, [3, 4, 5, 6, 7]),
        (1, 12, list(range(1, 13))),
        (0, 3, [0, 1, 2, 3]),
        (100, 200, [100, 101, 102, 103, 104, 105, 106, 127, 128, 129, 199, 200]),
        (5000, 5020, [5000, 5001, 5002, 5003, 5004, 5005, 5006, 5007, 5008, 5009, 5019, 5020]),
    ],
)
def test_edge_sizes_prefers_powers_of_two(low, high, sizes):
    assert list_edge_sizes(low, high) == sizes


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_edge_sizes_stay_in_range_and_include_ends(low: int, more: int) -> None:
    found = list_edge_sizes(low, low + more)
    assert {low, low + more} <= set(found) <= set(range(low, low + more + 1))
    assert len(found) == len(set(found)) == min(MAX_SIZES, more + 1) and found == sorted(found)


def test_sweep_without_ranges_has_single_run():
    assert sweep({}) == [{}]


def test_sweep_of_single_range_has_edge_sizes():
    assert sweep({"S": (1, 3)}) == [{"S": 1}, {"S": 2}, {"S": 3}]


def test_sweep_of_two_ranges_varies_single_dimension():
    found = sweep({"S": (1, 512), "N": (1, 4)})
    assert found[:2] == [{"S": 1, "N": 1}, {"S": 512, "N": 4}]
    assert len(found) == MAX_SIZES and all(one["S"] == 512 or one["N"] == 4 for one in found[1:])
    assert {one["N"] for one in found} == {1, 2, 3, 4}


def test_next_size_halves_gap():
    assert choose_next_size(1, {1: False, 64: True}) == 32
    assert choose_next_size(1, {1: False, 32: False, 64: True}) == 48
    assert choose_next_size(1, {63: False, 64: True}) is None
    assert choose_next_size(1, {1: True, 64: True}) is None
    assert choose_next_size(1, {64: True, 512: True}) == 32
    assert choose_next_size(1, {1: False, 512: False}) is None


def shrunk(ranges: dict[str, tuple[int, int]], fails: Callable[..., bool]) -> tuple[int, ...] | None:
    """Run a sweep and the search after it; returns the smallest failing sizes."""
    tried = {tuple(one.values()): fails(*one.values()) for one in sweep(ranges)}
    while (one := choose_next_combination(ranges, tried)) is not None:
        tried[tuple(one[name] for name in ranges)] = fails(*(one[name] for name in ranges))
        assert len(tried) < 60
    return find_smallest_failing(tried)


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_search_finds_smallest_failing_size(high: int, limit: int) -> None:
    assert shrunk({"S": (1, high)}, lambda size: size >= limit) == ((limit,) if limit <= high else None)


def test_search_shrinks_each_dimension():
    assert shrunk({"S": (1, 512), "N": (1, 8)}, lambda s, n: s >= 37 and n >= 3) == (37, 3)
    assert shrunk({"S": (1, 512), "N": (1, 8)}, lambda s, n: n == 8) == (1, 8)

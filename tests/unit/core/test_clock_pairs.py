from __future__ import annotations

from hil.core.clock import convert_by_pairs

DAY_NS = 86_400 * 10**9


def test_by_pairs_without_pairs_returns_same_time() -> None:
    assert convert_by_pairs(123, []) == 123


def test_by_pairs_applies_offset_of_single_pair() -> None:
    assert convert_by_pairs(150, [(100, 1000)]) == 1050


def test_by_pairs_interpolates_and_extrapolates_linearly() -> None:
    clock = [(100, 1000), (150, 1111), (200, 1200)]
    assert [convert_by_pairs(time, clock) for time in (0, 100, 150, 200, 300)] == [800, 1000, 1100, 1200, 1400]


def test_by_pairs_retains_nanoseconds_after_a_year() -> None:
    year = 365 * DAY_NS
    clock = [(year, year + 7), (year + 10**9, year + 7 + 10**9)]
    assert convert_by_pairs(year + 123_456_789, clock) == year + 123_456_796


def test_by_pairs_stays_monotonic_after_clock_step_back() -> None:
    clock = [(100, 1000), (200, 900)]
    assert [convert_by_pairs(time, clock) for time in (100, 150, 200)] == [1000, 1050, 1100]

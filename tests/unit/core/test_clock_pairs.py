from __future__ import annotations

from hil.core.clock import by_pairs

DAY_NS = 86_400 * 10**9


def test_without_pairs_it_is_the_same_clock() -> None:
    assert by_pairs(123, []) == 123


def test_one_pair_tells_the_offset() -> None:
    assert by_pairs(150, [(100, 1000)]) == 1050


def test_between_two_pairs_and_beyond_them_time_is_linear() -> None:
    clock = [(100, 1000), (150, 1111), (200, 1200)]
    assert [by_pairs(time, clock) for time in (0, 100, 150, 200, 300)] == [800, 1000, 1100, 1200, 1400]


def test_nanoseconds_of_a_clock_that_has_run_for_a_year_are_kept() -> None:
    year = 365 * DAY_NS
    clock = [(year, year + 7), (year + 10**9, year + 7 + 10**9)]
    assert by_pairs(year + 123_456_789, clock) == year + 123_456_796


def test_a_clock_that_was_set_back_does_not_turn_time_around() -> None:
    clock = [(100, 1000), (200, 900)]
    assert [by_pairs(time, clock) for time in (100, 150, 200)] == [1000, 1050, 1100]

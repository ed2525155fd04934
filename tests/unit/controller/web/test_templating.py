"""Test the number formats of pages."""

import pytest

from hil.controller.web.templating import make_environment

FILTERS = make_environment().filters


def test_statistic_filter_preserves_digits_of_cosine():
    assert FILTERS["statistic"](0.99979, "cosine") == "0.99979"
    assert FILTERS["statistic"](0.99979, "max_abs") == "1"
    assert FILTERS["statistic"](None, "cosine") == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0796, "1.080x"), (0.5, "0.500x"), (438401.958, "4.38e+05x"), (0.000123, "0.000123x"), (0, "0x"), (None, "")],
)
def test_ratio_filter_shows_significant_digits(value, text):
    assert FILTERS["ratio"](value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(12345678, "12345678"), (2048.0, "2048"), (0.012345, "0.0123"), (1234.5, "1.23e+03"), (3.4e38, "3.4e+38")],
)
def test_number_filter_shows_all_digits_of_whole_numbers(value, text):
    assert FILTERS["number"](value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.0 %"), (0.01, "< 0.1 %"), (66.66, "66.7 %"), (99.97, "> 99.9 %"), (100, "100.0 %"), (101.2, "101.2 %")],
)
def test_percent_filter_rounds_neither_to_nothing_nor_to_all(value, text):
    assert FILTERS["percent"](value) == text
    assert FILTERS["percent"](None) == ""


def test_units_roll_over_when_numbers_round_up():
    assert [FILTERS["seconds"](value) for value in (0.9996, 999.6e-6, 999.4e-6)] == ["1 s", "1 ms", "999 us"]
    assert [FILTERS["bytes"](value) for value in (999, 999_600, 999_400)] == ["999 B", "1 MB", "999 kB"]
    assert FILTERS["si"](999_600, "op/s") == "1 Mop/s"

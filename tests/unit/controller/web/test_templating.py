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

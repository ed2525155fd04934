"""What errors of other people's code say, in a line."""

from __future__ import annotations

import pytest

from hil.controller.said import first_line


@pytest.mark.parametrize(
    ("text", "line"), [("", "ValueError"), (" \n\n", "ValueError"), ("\n  why \n more", "why"), ("x" * 11, "x" * 10)]
)
def test_the_first_line_that_says_something_is_told(text: str, line: str) -> None:
    assert first_line(ValueError(text), most=10) == line

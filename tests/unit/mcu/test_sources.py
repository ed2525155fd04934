"""The firmware stays small."""

from __future__ import annotations

import re

import pytest

from hil.controller.backends.compilers.firmware.linking import SOURCES, list_sources
from hil.core.chips import CHIPS

MAX_LINES = 600


def count_lines(text: str) -> int:
    """Return the lines of C code without comments and empty lines."""
    code = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
    return sum(bool(line.strip()) for line in code.splitlines())


def test_comments_and_empty_lines_do_not_count() -> None:
    assert count_lines("// a\n\nint x;  // b\n/* c\n   d */\nint y;\n") == 2


@pytest.mark.parametrize("name", CHIPS)
def test_firmware_of_a_chip_has_at_most_600_lines(name: str) -> None:
    lines = {path.name: count_lines(path.read_text()) for path in (*list_sources(CHIPS[name]), SOURCES / "hil.h")}
    assert sum(lines.values()) <= MAX_LINES, lines

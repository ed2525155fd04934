"""The names under which packages find hil's types."""

from __future__ import annotations

import re
from pathlib import Path

from hil import plugins

GUIDE = Path(__file__).parents[2] / "docs" / "extending.md"


def test_every_name_that_is_promised_is_there() -> None:
    assert [name for name in plugins.__all__ if not hasattr(plugins, name)] == []


def test_the_guide_names_only_what_is_promised() -> None:
    named = set(re.findall(r"hil\.plugins\.(\w+)", GUIDE.read_text()))
    assert named and named <= set(plugins.__all__)

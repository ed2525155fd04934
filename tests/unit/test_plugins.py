"""The public names through which packages use hil's types."""

from __future__ import annotations

import re
from pathlib import Path

from hil import plugins

GUIDE = Path(__file__).parents[2] / "docs" / "extending.md"


def test_plugins_define_every_public_name() -> None:
    assert [name for name in plugins.__all__ if not hasattr(plugins, name)] == []


def test_extending_guide_uses_only_public_names() -> None:
    named = set(re.findall(r"hil\.plugins\.(\w+)", GUIDE.read_text()))
    assert named and named <= set(plugins.__all__)

"""The public names through which packages use hil's types."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

from hil import errors, plugins
from hil.agent import plugins as agent_plugins

GUIDE = Path(__file__).parents[2] / "docs" / "extending.md"
NAMES = (GUIDE.parent / "plugin-names.md").read_text()
EXAMPLE = GUIDE.parents[1] / "examples" / "hil-npx"


def test_plugins_define_every_public_name() -> None:
    assert [name for name in plugins.__all__ if not hasattr(plugins, name)] == []
    assert [name for name in agent_plugins.__all__ if not hasattr(agent_plugins, name)] == []


def test_extending_guide_uses_only_public_names() -> None:
    named = set(re.findall(r"hil\.plugins\.(\w+)", GUIDE.read_text()))
    assert named and named <= set(plugins.__all__)


def read_rows(heading: str) -> list[str]:
    """Return the names in the first column of a section's tables."""
    section = NAMES.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \|", section, re.M)
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


def test_names_page_lists_all_public_names() -> None:
    named = set(re.findall(r"`(\w+)[`(.]", NAMES))
    assert set(plugins.__all__) - named == set()
    assert set(agent_plugins.__all__) - named == set()
    listed = set(read_rows("Names in hil.agent.plugins"))
    assert listed == set(agent_plugins.__all__)


def test_names_page_lists_compiler_arguments_and_artifact() -> None:
    arguments = {*get_type_hints(plugins.CompileOrder)}
    assert set(read_rows("Compilers")) == arguments | {field.name for field in fields(plugins.Artifact)}


def test_names_page_gives_outcomes_of_errors() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| `([A-Z_]+)` \|$", NAMES, re.M)
    assert len(rows) == 10
    assert [name for name, outcome in rows if getattr(errors, name).outcome != outcome] == []


def test_example_guide_quotes_the_example() -> None:
    text = (GUIDE.parent / "vendor-example.md").read_text()
    quotes = [quote for language, quote in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S) if not language]
    sources = [path.read_text() for path in (*EXAMPLE.glob("hil_npx/*.py"), EXAMPLE / "pyproject.toml")]
    assert len(quotes) == 5
    assert [quote for quote in quotes if not any(quote in source for source in sources)] == []

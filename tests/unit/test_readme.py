"""The README lists what users need to know about the package."""

from __future__ import annotations

import re
from pathlib import Path

from hil import errors

README = (Path(__file__).parents[2] / "README.md").read_text()
# Extras of other extras, of boards and of developers of hil.
_INTERNAL = {"agent", "sim", "docs", "dev"}


def test_readme_lists_all_extras() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    table = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", table, re.MULTILINE)) - _INTERNAL
    rows = [line.split("|")[1] for line in README.splitlines() if line.startswith("| `hil[")]
    assert set(re.findall(r"\[(\w+)\]", " ".join(rows))) == extras


def test_readme_lists_all_exit_codes() -> None:
    table = README.partition("## Exit codes")[2].partition("\n## ")[0]
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert set(map(int, re.findall(r"^\| (\d+) \|", table, re.MULTILINE))) == codes

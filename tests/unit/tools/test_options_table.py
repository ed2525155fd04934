"""The table of options by workload, and the reasons for gaps."""

from __future__ import annotations

from tools.options_table import PAGE, find_gaps, find_unused_reasons, list_options, write_page


def test_each_gap_has_reason() -> None:
    options = list_options()
    assert "--compile-flag" in options and options["--compile-flag"] >= {"run", "suite run", "pytest", "farm submit"}
    assert [gap for gap, reason in find_gaps(options).items() if not reason] == []


def test_each_reason_describes_gap() -> None:
    assert find_unused_reasons(list_options()) == []


def test_page_matches_commands() -> None:
    assert PAGE.read_text() == write_page(), "run: .venv/bin/python -m tools.options_table"

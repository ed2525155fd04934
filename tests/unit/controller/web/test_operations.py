"""Test the table of operations: order, missing values last, and pages."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.shown_profile import example

from hil.controller.analysis.profile.store import write_profile
from hil.controller.web.pages.traces.operations import TableQuery, read_diff, read_totals, select_diffs, select_totals
from hil.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_profile(example("monday"), tmp_path / "monday")
    write_profile(example("tuesday", slower=2), tmp_path / "tuesday")
    return tmp_path


def test_operations_table_sorts_and_pages(folder):
    found = read_totals(folder / "monday", "node")

    def names(order: str, page: int = 1, rows: int = 10) -> list[str]:
        return [one.name for one in select_totals(found, TableQuery(order=order, page=page), rows).rows]

    assert names("") == names("-time")[:2] + names("")[2:] == ["fc1, relu1", "fc2", "fc3", "(runtime)"]
    assert names("time")[-1] == "fc1, relu1"
    # The runtime's row has no estimate, so it is last in both orders.
    assert names("speed")[-1] == names("-speed")[-1] == "(runtime)"
    assert names("name") == sorted(names(""))
    page = select_totals(found, TableQuery(page=9), 3)
    assert (page.total, page.pages, [one.name for one in page.rows]) == (4, 2, ["(runtime)"])
    for wrong in ("nothing", "-", "__class__"):
        with pytest.raises(UsageError, match="invalid order"):
            names(wrong)
    with pytest.raises(UsageError, match="invalid grouping"):
        read_totals(folder / "monday", "moon")


def test_operations_totals_follow_rewritten_profile(folder):
    before = read_totals(folder / "monday", "op")
    assert read_totals(folder / "monday", "op") is before
    write_profile(example("monday", slower=3), folder / "monday")
    assert read_totals(folder / "monday", "op") != before


def test_operations_diff_compares_profiles(folder):
    diff = read_diff(folder / "monday", folder / "tuesday")
    rows = select_diffs(diff.ops, TableQuery(order="-b"), 2).rows
    assert [(one.name, one.b.p50_ns) for one in rows] == [("fc1;relu1", 60_000), ("fc2", 40_000)]


def test_table_query_omits_defaults():
    asked = TableQuery(by="type", order="-time", page=3)
    assert asked.query() == "by=type&order=-time"
    assert asked.query(page=2) == "by=type&order=-time&page=2"
    assert TableQuery().query() == ""

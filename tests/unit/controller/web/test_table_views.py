"""Test the URL parameters of the view of tables, and the rows of grouped tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.web import asking, write_suite

from hil.controller.web.index.sessions import PAGE_ROWS
from hil.controller.web.text.table_views import check_table_view, has_tables, list_view_parameters
from hil.errors import UsageError


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("columns", "table-of-cases", "expected TABLE~COLUMN"),
        ("columns", "table-of-cases~Outcome", "expected TABLE~COLUMN"),
        ("columns", "a~" + "x" * 100, "expected TABLE~COLUMN"),
        ("group", "table-of-cases~outcome~case", "grouped by one column"),
        ("group", "<b>~c", "expected TABLE~COLUMN"),
        ("view", "x" * 61, "at most 60 characters"),
        ("view", "a\x1bb", "at most 60 characters"),
    ],
)
def test_invalid_view_is_rejected(tmp_path: Path, name: str, value: str, message: str) -> None:
    with asking(tmp_path) as client:
        answer = client.get("/", params={name: value})
    assert answer.status_code == 400 and message in answer.text and "<b>~c" not in answer.text


def test_view_parameters_may_repeat_per_table() -> None:
    names = list_view_parameters(())
    check_table_view([("columns", "a~b"), ("columns", "c~d"), ("group", "a~b"), ("view", "Nightly, \u00e4")], names)
    with pytest.raises(UsageError, match="too many views"):
        check_table_view([("view", "a"), ("view", "b")], names)
    with pytest.raises(UsageError, match="too many views"):
        check_table_view([("columns", "a~b")] * 51, names)


def test_page_with_own_columns_uses_another_name(tmp_path: Path) -> None:
    assert list_view_parameters(("rows", "columns")) == ("table.columns", "group", "view")
    with asking(tmp_path) as client:
        answer = client.get("/tensors", params={"table.columns": "no"})
        assert answer.status_code == 400 and "invalid table.columns" in answer.text
        assert 'data-columns="columns"' in client.get("/").text


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/", True), ("/history/regressions", True), ("/sessions.csv", False), ("/api/there", False), ("/file", False)],
)
def test_only_pages_have_views(path: str, expected: bool) -> None:
    assert has_tables(path) is expected


def test_csv_and_api_reject_view_parameters(tmp_path: Path) -> None:
    with asking(tmp_path) as client:
        for path in ("/sessions.csv", "/api/there"):
            assert client.get(path, params={"group": "a~b"}).status_code == 400


def test_grouped_table_has_rows_of_all_pages(tmp_path: Path) -> None:
    write_suite(tmp_path, "long", [{"id": f"case-{number}"} for number in range(PAGE_ROWS + 50)])
    with asking(tmp_path) as client:
        some = client.get("/session?id=long").text
        every = client.get("/session?id=long&group=table-of-cases~outcome").text
    assert (some.count('<td class="name">'), every.count('<td class="name">')) == (PAGE_ROWS, PAGE_ROWS + 50)
    assert 'rel="next"' in some and 'rel="next"' not in every

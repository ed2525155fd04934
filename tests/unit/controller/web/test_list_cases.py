"""Test the case table of a session: filters, order and pages."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
from support.web import write_suite

from hil.controller.web.index.index import IndexReader, IndexWriter
from hil.controller.web.index.indexer import Indexer
from hil.controller.web.index.sessions import PAGE_ROWS, CaseFilter, CasePage, find_session, list_cases

OUTCOMES = ("PASS", "FAIL", "XFAIL", "SKIP", "RUN_CRASH")
CASES = [
    {
        "id": f"model{number % 3}_layer_{'Conv' if number % 2 else 'Relu'}_{number * 7 % 250}",
        "op": "Conv" if number % 2 else "Relu",
        "model": f"model{number % 3}",
        "outcome": OUTCOMES[number % 5],
        "message": f"conv reason {number}" if OUTCOMES[number % 5] == "FAIL" else "",
        "device_p50_ns": None if number % 11 == 0 else 1000 + number * 37 % 101,
    }
    for number in range(250)
]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sqlite3.Connection]:
    folder = tmp_path_factory.mktemp("index")
    write_suite(folder / "runs", "one", CASES)
    write_suite(folder / "runs", "other", CASES[:20])
    with IndexWriter(folder / "index.sqlite") as writer:
        Indexer(writer, [folder / "runs"]).scan()
    with IndexReader(folder / "index.sqlite").open_snapshot() as found:
        yield found


def listed(database: sqlite3.Connection, **asked: Any) -> CasePage:
    return list_cases(database, find_session(database, "one"), CaseFilter(**asked))


def names(page: CasePage) -> list[str]:
    return [row["name"] for row in page.cases]


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ({}, lambda one: True),
        ({"outcome": "FAIL"}, lambda one: one["outcome"] == "FAIL"),
        ({"outcome": "failing"}, lambda one: one["outcome"] in ("FAIL", "RUN_CRASH")),
        ({"op": "Conv", "model": "model1"}, lambda one: one["op"] == "Conv" and one["model"] == "model1"),
        ({"q": "CONV_1"}, lambda one: "conv_1" in one["id"].lower()),
        ({"q": "model2 relu", "outcome": "PASS"}, lambda one: _has(one, "model2", "relu") and one["outcome"] == "PASS"),
        # The filter ignores reasons.
        ({"q": "reason"}, lambda one: False),
        ({"outcome": "no such word"}, lambda one: False),
    ],
)
def test_list_cases_filters_and_counts(database: sqlite3.Connection, asked: Any, fits: Any) -> None:
    wanted = [one["id"] for one in CASES if fits(one)]
    first = listed(database, **asked)
    assert (first.total, first.pages) == (len(wanted), max(1, -(-len(wanted) // PAGE_ROWS)))
    seen = [name for page in range(first.pages) for name in names(listed(database, **asked, page=page + 1))]
    assert seen == wanted


def _has(one: dict[str, Any], *words: str) -> bool:
    return all(word in one["id"].lower() for word in words)


@pytest.mark.parametrize("sign", ["", "-"])
def test_list_cases_sorts_all_pages_with_missing_values_last(database: sqlite3.Connection, sign: str) -> None:
    pages = [listed(database, order=f"{sign}time", page=page + 1) for page in range(3)]
    times = [row["device_p50_ns"] for page in pages for row in page.cases]
    known = sorted((one["device_p50_ns"] for one in CASES if one["device_p50_ns"]), reverse=bool(sign))
    assert times == known + [None] * (len(CASES) - len(known))
    by_name = [name for page in range(3) for name in names(listed(database, order=f"{sign}name", page=page + 1))]
    assert by_name == sorted((one["id"] for one in CASES), reverse=bool(sign))


def test_list_cases_sorts_outcomes_by_severity(database: sqlite3.Connection) -> None:
    found = [row["outcome"] for page in range(3) for row in listed(database, order="-outcome", page=page + 1).cases]
    # XFAIL and SKIP need no attention: they have the same rank, after PASS.
    severity = {"RUN_CRASH": 0, "FAIL": 1, "PASS": 2, "XFAIL": 3, "SKIP": 3}
    assert [severity[one] for one in found] == sorted(severity[one["outcome"]] for one in CASES)


def test_list_cases_clamps_page_to_last(database: sqlite3.Connection) -> None:
    beyond = listed(database, page=99)
    assert (names(beyond), beyond.total) == ([one["id"] for one in CASES[200:]], 250)


def test_list_cases_uses_given_page_size(database: sqlite3.Connection) -> None:
    found = list_cases(database, find_session(database, "one"), CaseFilter(page=2), rows=60)
    assert (names(found), found.pages) == ([one["id"] for one in CASES[60:120]], 5)

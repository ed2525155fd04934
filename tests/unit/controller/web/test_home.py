"""Test the home page: the grid of nights, the baseline, and the sessions."""

from __future__ import annotations

import csv
import io
import re
import sqlite3
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from support.nights import DAY, FIRST_NIGHT, write_nights
from support.web import ADDRESS, asking, write_run, write_suite

from hil.controller.web.access.security import AccessRules
from hil.controller.web.history.nights import read_night_grid
from hil.controller.web.index.index import IndexWriter
from hil.controller.web.index.indexer import Indexer
from hil.controller.web.pages.home import home
from hil.controller.web.server.app import create_app


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("nights")
    write_nights(root, 9)
    return root


def grid_of(client, **values):
    with client.app.state.site.reader.open_snapshot() as database:
        return read_night_grid(database, **values)


def test_grid_has_row_per_board_and_cell_per_night(nights: Path) -> None:
    with asking(nights) as client:
        page = client.get("/").text
        grid = grid_of(client)
    assert (grid.nights[0], len(grid.nights)) == ("2023-11-23", 14)
    assert sorted(row.board for row in grid.rows) == ["evk1", "evk2", "rpi5"]
    assert [cell is not None for cell in grid.rows[0].cells] == [True] * 9 + [False] * 5
    assert grid.rows[0].cells[0].texts == [("error", "4 error"), ("fail", "2 fail"), ("pass", "12 pass")]
    cells = re.findall(r'<a class="night (\w+)" href="([^"]*)"', page)
    assert len(cells) == 27 and cells[0] == ("error", "/session?id=evk1-08")


def test_grid_begins_today_if_sessions_are_recent(tmp_path: Path) -> None:
    write_suite(tmp_path, "one", [{}], started=FIRST_NIGHT)
    with asking(tmp_path) as client:
        recent = grid_of(client, now=FIRST_NIGHT + 3 * DAY)
        old = grid_of(client, now=FIRST_NIGHT + 99 * DAY)
    assert [cell is not None for cell in recent.rows[0].cells][:5] == [False, False, False, True, False]
    assert recent.nights[0] == "2023-11-18"
    assert old.nights[0] == "2023-11-15" and old.rows[0].cells[0] is not None


def test_session_with_wrong_clock_does_not_hide_others(tmp_path: Path) -> None:
    for number, outcome in enumerate(["PASS", "FAIL"]):
        write_suite(tmp_path, f"s{number}", [{"outcome": outcome}], started=FIRST_NIGHT + number * DAY)
    write_suite(tmp_path, "future", [{}], suite="other", started=8e9)
    with asking(tmp_path) as client:
        page = client.get("/").text
        assert grid_of(client).nights[0] == "2023-11-16"
    assert "New since night 2023-11-15" in page and "1 case fails" in page


def test_grid_shows_failing_rows_first_and_newest_session_of_night(tmp_path: Path) -> None:
    write_suite(tmp_path, "good", [{}], boards=["a"], started=FIRST_NIGHT)
    write_suite(tmp_path, "bad", [{"outcome": "FAIL"}], boards=["b"], started=FIRST_NIGHT)
    write_suite(tmp_path, "lost", [{"outcome": "BOARD_LOST"}], boards=["c"], started=FIRST_NIGHT)
    write_suite(tmp_path, "again", [{"outcome": "FAIL"}, {"id": "x"}], boards=["b"], started=FIRST_NIGHT + 60)
    with asking(tmp_path) as client:
        grid = grid_of(client)
        assert [row.board for row in grid_of(client, most=2).rows] == ["c", "b"]
        assert grid_of(client, most=2).left_out == 1
    assert [row.board for row in grid.rows] == ["c", "b", "a"]
    cell = grid.rows[1].cells[0]
    assert (cell.link, cell.sessions, cell.texts) == ("id=again", 2, [("fail", "1 fail"), ("pass", "1 pass")])


def test_home_without_suites_lists_sessions_only(tmp_path: Path) -> None:
    write_run(tmp_path, "one", [{}])
    with asking(tmp_path) as client:
        page = client.get("/")
    assert page.status_code == 200 and 'class="rows nights"' not in page.text and "id=one" in page.text


def test_filtered_home_lists_sessions_only(nights: Path) -> None:
    with asking(nights) as client:
        page = client.get("/?board=evk1").text
        assert "<h1>Sessions</h1>" in page and 'class="rows nights"' not in page
        assert client.get("/?since=branch:main").text.count("<h1>Results</h1>") == 1


def test_home_parts_are_fetched_alone(nights: Path) -> None:
    with asking(nights) as client:
        grid = client.get("/", headers={"hx-target": "nights"}).text
        sessions = client.get("/", headers={"hx-target": "sessions"}).text
    assert grid.lstrip().startswith('<div id="nights"') and 'id="sessions"' not in grid
    assert sessions.lstrip().startswith('<div id="sessions"') and 'id="nights"' not in sessions


@pytest.mark.parametrize("since", ["night:yesterday", "night:", "main", "tag:x", "night"])
def test_invalid_baseline_is_rejected(nights: Path, since: str) -> None:
    with asking(nights) as client:
        answer = client.get("/", params={"since": since})
    assert answer.status_code == 400 and ("invalid baseline" in answer.text or "invalid date" in answer.text)


def test_branch_baseline_compares_with_its_newest_earlier_session(tmp_path: Path) -> None:
    for number, (branch, outcome) in enumerate(
        [("main", "PASS"), ("feature", "FAIL"), ("main", "PASS"), ("feature", "FAIL")]
    ):
        origin = {"branch": branch, "commit": f"{number:040x}", "labels": [f"v{number}"]}
        case = {"outcome": outcome, "ended": outcome}
        write_suite(tmp_path, f"s{number}", [case], started=FIRST_NIGHT + number * DAY, origin=origin)
    with asking(tmp_path) as client:
        main, feature = (client.get(f"/?since=branch:{name}").text for name in ("main", "feature"))
        label, missing = (client.get(f"/?since=label:{name}").text for name in ("v3", "none"))
        default = client.get("/").text
        table = client.get("/changes.csv?since=branch:none")
    assert "1 case fails" in main and "New since branch main" in main
    assert "1 case fails" in feature
    # The newest session cannot be a baseline, and an unknown label has no session.
    assert "No earlier session of label v3" in label and "No earlier session of label none" in missing
    # Nothing was compared, so pages and files must not look like a success.
    assert "Nothing was compared" in missing and "No new failures" not in missing
    assert table.status_code == 404 and "no earlier session of branch" in table.text
    assert "New since night 2023-11-17" in default and "1 case fails" in default
    offered = re.findall(r'<option value="((?:night|branch|label):[^"]*)"', default)
    assert {"night:2023-11-17", "branch:main", "branch:feature", "label:v0"} <= set(offered)
    assert "night:2023-11-18" not in offered


@pytest.mark.parametrize("since", ["", "night:2023-11-15", "branch:main", "label:v0"])
def test_new_compile_error_is_a_cause_for_every_baseline(tmp_path: Path, since: str) -> None:
    for number, case in enumerate([{"board": "evk1"}, {"board": "", "outcome": "COMPILE_ERROR"}]):
        origin = {"branch": "main", "labels": [f"v{number}"]}
        write_suite(tmp_path, f"s{number}", [case], boards=["evk1"], started=FIRST_NIGHT + number * DAY, origin=origin)
    with asking(tmp_path) as client:
        assert "1 cause of 1 changed case" in client.get("/", params={"since": since}).text


def test_change_during_request_is_on_next_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, index, list_choices = tmp_path / "runs", tmp_path / "index.sqlite", home.sessions.list_choices
    write_suite(root, "s0", [{}], started=FIRST_NIGHT)
    with IndexWriter(index) as writer:
        indexer = Indexer(writer, [root])
        indexer.scan()

        def index_meanwhile(database: sqlite3.Connection) -> dict[str, list[str]]:
            if not (root / "s1").exists():
                write_suite(root, "s1", [{"outcome": "FAIL"}], started=FIRST_NIGHT + DAY)
                indexer.scan()
            return list_choices(database)

        monkeypatch.setattr(home.sessions, "list_choices", index_meanwhile)
        with TestClient(create_app([root], index, indexer.progress, AccessRules("127.0.0.1", "")), ADDRESS) as client:
            client.get("/")
            assert "1 cause of 1 changed case" in client.get("/").text


def test_home_tables_are_available_as_csv(nights: Path) -> None:
    with asking(nights) as client:
        cells = list(csv.DictReader(io.StringIO(client.get("/nights.csv").text)))
        changes = list(csv.DictReader(io.StringIO(client.get("/changes.csv?since=night:2023-11-20").text)))
        page = client.get("/?since=night:2023-11-20").text
        key = unescape(re.findall(r'href="/cause\?([^"]*)"', page)[0])
        part = list(csv.DictReader(io.StringIO(client.get(f"/changes.csv?{key}").text)))
    assert len(cells) == 27 and cells[0]["outcomes"] == "4 error, 2 fail, 12 pass"
    assert {row["what"] for row in changes} == {"broke"} and len({row["cause"] for row in changes}) == 2
    assert 0 < len(part) < len(changes) and len({row["cause"] for row in part}) == 1


def test_unknown_cause_is_reported(nights: Path) -> None:
    with asking(nights) as client:
        answer = client.get("/cause?since=night:2023-11-20&key=none")
    assert answer.status_code == 404 and "no such cause" in answer.text


def test_session_lists_failing_cases_first(tmp_path: Path) -> None:
    outcomes = {"a": "PASS", "b": "FAIL", "c": "SKIP", "d": "RUN_ERROR"}
    cases = [{"id": name, "outcome": outcome} for name, outcome in outcomes.items()]
    write_suite(tmp_path, "one", cases)
    with asking(tmp_path) as client:
        page = client.get("/session?id=one").text
        named = client.get("/session?id=one&order=name").text
    pattern = r'class="name"><a href="/case\?id=one&amp;case=(\w)"'
    assert re.findall(pattern, page) == ["b", "d", "a", "c"] and re.findall(pattern, named) == ["a", "b", "c", "d"]
    # The outcome comes before the metadata.
    assert page.index('class="outcomes"') < page.index('class="facts"')

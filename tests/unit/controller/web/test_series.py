"""Pages of the series of a history."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import sqlite3
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import urlencode

import pytest
from starlette.testclient import TestClient
from support.browser import Page, find_browser
from support.histories import history_entry
from support.web import asking, serving, write_run
from support.web_hostile import PAYLOADS
from support.web_pages import Crawl, check_page, of_templates

from hil.controller.cli.stored.web import _find_farm_history, _find_history
from hil.controller.records.measurements.history import HistoryEntry
from hil.controller.storage.history.place import FILE, HistoryPlace
from hil.controller.storage.history.store import HistoryStore
from hil.controller.web.history import run_series

ALLOWED = of_templates()
SLOW, BROKEN, FIXED = 20, 5, 7


def nightly_entries(count: int = 32, key: dict[str, str] | None = None) -> list[HistoryEntry]:
    """Return entries of a case that fails twice, and later becomes 8 % slower."""
    rolled = random.Random(5)
    found = []
    for number in range(count):
        level = 1e6 * rolled.gauss(1, 0.004) * (1.08 if number >= SLOW else 1)
        samples = [level * rolled.gauss(1, 0.01) for _ in range(40)]
        values = {"created": 1.7e9 + 86400 * number, "commit": f"{number:04x}feed", "clock": "board"}
        values |= {"outcome": "FAIL" if BROKEN <= number < FIXED else "PASS", "reason": "y differs"}
        found.append(history_entry(f"r{number}", key=key, p50_ns=level, samples_ns=samples, iterations=40, **values))
    return found


def write_history(folder: Path, entries: list[HistoryEntry]) -> str:
    """Store entries and return the ID of the first series."""
    with HistoryStore.open(folder, create=True) as store:
        assert store.add(entries).added == len(entries)
        return store.series()[0].id


@pytest.fixture
def series_id(tmp_path: Path) -> str:
    found = write_history(tmp_path / "history", nightly_entries())
    with HistoryStore.open(tmp_path / "history") as store:
        store.annotate("0014feed", "new <compiler>")
        store.confirm(next(store.entries()), "measured")
    return found


@pytest.fixture
def client(tmp_path: Path, series_id: str) -> Iterator[TestClient]:
    write_run(tmp_path / "hil-runs", "r3")
    with asking(tmp_path, history=HistoryPlace(tmp_path / "history")) as found:
        yield found


def test_series_page_shows_changes_and_runs(client: TestClient, series_id: str) -> None:
    page = client.get("/series", params={"id": series_id}).text
    changes = re.findall(r"<li>(.*?)</li>", page, re.S)
    texts = [" ".join(re.sub("<[^>]+>", " ", one).split()) for one in changes]
    assert [re.match("[^ ]+", one)[0][:4] for one in texts] == ["1.08", "PASS", "FAIL"]
    assert "0014feed" in texts[0] and "0005feed" in texts[2]
    assert page.count('<tr class="step">') == 1
    assert 'href="/session?id=hil-runs%2Fr3">r3</a>' in page and ">r4</a>" not in page
    assert "new &lt;compiler&gt;" in page
    chart = json.loads(unescape(re.search('data-history="([^"]*)"', page)[1]))
    assert (chart["steps"], chart["remarks"], chart["confirmed"]) == ([{"at": SLOW, "worse": True}], [SLOW], [0])
    lows, highs = chart["bars"]
    assert all(low < value < high for low, value, high in zip(lows, chart["values"], highs, strict=True))
    assert chart["names"][BROKEN] == "0005feed FAIL" and chart["kinds"][BROKEN] == "fail"


def test_series_list_finds_text_and_links_series(client: TestClient, series_id: str) -> None:
    assert f'href="/series?id={series_id}"' in client.get("/series?q=M.ONNX").text
    assert "No matching series." in client.get("/series?q=other").text


def test_series_csv_has_intervals(client: TestClient, series_id: str) -> None:
    assert series_id in client.get("/series.csv").text
    rows = list(csv.DictReader(io.StringIO(client.get("/series.csv", params={"id": series_id}).text)))
    assert [row["run"] for row in rows][:2] == ["r31", "r30"]
    assert float(rows[0]["low_ns"]) < float(rows[0]["p50_ns"]) < float(rows[0]["high_ns"])
    assert [row["run"] for row in rows if row["level_begins"] == "yes"] == [f"r{SLOW}"]


def test_series_page_is_limited_to_newest_runs(
    client: TestClient, series_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_series, "MAX_RUNS", 4)
    page = client.get("/series", params={"id": series_id}).text
    assert "4 runs, the newest of 32" in page and "r28" in page and "r27" not in page


def test_runs_of_other_clock_and_board_errors_are_not_compared() -> None:
    entries = nightly_entries(9)
    entries[2] = entries[2].replace(clock="host")
    entries[4] = entries[4].replace(outcome="BOARD_LOST")
    entries[6] = entries[6].replace(p50_ns=None)
    runs = [run_series.MeasuredRun(one, None, None) for one in entries]
    assert run_series.judge_runs(None, runs).judged == [0, 1, 3, 5, 7, 8]


def test_series_of_evaluation_shows_scores(tmp_path: Path) -> None:
    with HistoryStore.open(tmp_path / "history", create=True) as store:
        for number in range(16):
            board = 0.9 if number < 8 else 0.7
            score = {"metric": "top1", "board": board, "reference": 0.95, "samples": 500}
            score |= {"is_higher_better": True, "is_share": True}
            entry = history_entry(f"r{number}", created=float(number), key={"kind": "eval"}, p50_ns=None, score=score)
            store.add([entry.replace(samples_ns=[])])
        name = store.series()[0].id
    with asking(tmp_path, history=HistoryPlace(tmp_path / "history")) as found:
        page = found.get("/series", params={"id": name}).text
        rows = list(csv.DictReader(io.StringIO(found.get("/series.csv", params={"id": name}).text)))
    assert "Now 70 %" in page and '<span class="verdict worse">0.778x</span> the score before' in page
    assert '<th scope="col" class="number">Score</th>' in page and "95 %" in page
    chart = json.loads(unescape(re.search('data-history="([^"]*)"', page)[1]))
    assert (chart["title"], chart["unit"], chart["values"][0]) == ("top1", "%", 90.0)
    assert chart["steps"] == [{"at": 8, "worse": True}]
    assert (rows[0]["score"], rows[-1]["score"]) == ("0.7", "0.9")


def test_series_page_shows_changes_of_negative_scores(tmp_path: Path) -> None:
    """A log likelihood has no ratio."""
    rolled = random.Random(7)
    entries = []
    for number in range(24):
        board = (-2.0 if number < 12 else -3.0) + rolled.gauss(0, 0.05)
        score = {"metric": "likelihood", "board": board, "reference": -2.0, "samples": 100}
        score |= {"is_higher_better": True, "is_share": False}
        values = {"created": 1.7e9 + 86400 * number, "score": score, "p50_ns": None, "samples_ns": []}
        entries.append(history_entry(f"r{number}", key={"kind": "eval"}, **values))
    series = write_history(tmp_path / "history", entries)
    with asking(tmp_path, history=HistoryPlace(tmp_path / "history")) as client:
        page = client.get("/series", params={"id": series}).text
    (change,) = re.findall(r"<li>(.*?)</li>", page, re.S)
    assert 'class="verdict worse"' in change
    assert re.search(r"-[12]\.\d+ to -[23]\.\d+</span>, since", change)
    chart = json.loads(unescape(re.search('data-history="([^"]*)"', page)[1]))
    assert chart["steps"] == [{"at": 12, "worse": True}]


@pytest.mark.parametrize("name", ["script", "quotes", "turned", "half"])
def test_series_pages_escape_texts(tmp_path: Path, name: str) -> None:
    text = PAYLOADS[name].encode(errors="replace").decode()
    key = dict.fromkeys(("kind", "model", "case", "function", "board", "runtime", "flow"), text)
    values = {"outcome": text, "reason": text, "board": {"name": text}, "commit": text}
    entries = [history_entry(f"{text}{number}", key=key, created=number, **values) for number in range(3)]
    found = write_history(tmp_path / "history", entries)
    with HistoryStore.open(tmp_path / "history") as store:
        store.annotate(text, text)
    with asking(tmp_path, history=HistoryPlace(tmp_path / "history")) as client:
        crawl = Crawl(client, most=5)
        crawl.start("/series", f"/series?id={found}", "/series?" + urlencode({"q": text[:99]}))
        for address, page in crawl.pages():
            check_page(page, ALLOWED, address)
    assert not crawl.failures and f"/series?id={found}" in crawl.visited


def test_missing_history_has_no_navigation(tmp_path: Path) -> None:
    for history in (None, HistoryPlace(tmp_path / "history")):
        with asking(tmp_path, history=history) as client:
            page = client.get("/series").text
            assert "No measurements yet" in page and 'href="/series"' not in page
            assert client.get("/series?id=ab").status_code == 404
    assert not (tmp_path / "history").exists()
    write_history(tmp_path / "history", [history_entry()])
    with asking(tmp_path, history=HistoryPlace(tmp_path / "history")) as client:
        assert '<a href="/series">Series</a>' in client.get("/").text


def test_damaged_history_is_reported(tmp_path: Path, series_id: str) -> None:
    with sqlite3.connect(tmp_path / "history" / FILE) as database:
        database.execute("update entries set document = x'7b' where run = 'r3'")
    with asking(tmp_path, history=HistoryPlace(tmp_path / "history")) as client:
        assert client.get("/series").status_code == 200
        answer = client.get("/series", params={"id": series_id})
        assert answer.status_code == 404 and "is damaged" in answer.text
    database.close()
    (tmp_path / "history" / FILE).write_bytes(b"not a database" * 100)
    with asking(tmp_path, history=HistoryPlace(tmp_path / "history")) as client:
        assert client.get("/series").status_code == 404
        assert client.get("/").status_code == 200


def test_pages_of_local_farm_show_its_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIL_FARM_HOME", str(tmp_path))
    monkeypatch.setenv("HIL_FARM_DB", "postgresql://lab/farm")
    assert _find_farm_history("local") is None
    (tmp_path / "farm.toml").write_text("[history]\nauto = true\n")
    assert _find_farm_history("local") == HistoryPlace(tmp_path / "history", "postgresql://lab/farm")
    assert _find_farm_history("lab:7070") is None


def test_web_finds_history_of_served_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for place in (first, second, third):
        place.mkdir()
    assert _find_history([first, second]) == HistoryPlace(first / "hil-runs" / "history")
    write_history(second / "history", [history_entry()])
    assert _find_history([first, second]) == HistoryPlace(second / "history")
    write_history(third / "kept", [history_entry()])
    (third / "hil.toml").write_text('[history]\npath = "kept"\n')
    assert _find_history([third, second]) == HistoryPlace(third / "kept")
    (third / "hil.toml").write_text('[history]\npath = "../second/history"\n')
    assert _find_history([third]) is None
    assert "history not shown" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not find_browser(), reason="no browser on PATH")
def test_series_page_draws_chart_on_narrow_and_wide_screens(tmp_path: Path, series_id: str) -> None:
    with serving(tmp_path, history=HistoryPlace(tmp_path / "history")) as address:
        for width in (390, 1280):
            with Page(find_browser() or "", width=width) as page:
                page.open(f"{address}/series?id={series_id}")
                page.wait("!!document.querySelector('.plot canvas')")
                page.point(".plot", 150, 100)
                page.wait("document.querySelector('.u-legend').innerText.includes('feed')")
                assert not page.run("document.documentElement.scrollWidth > innerWidth")
                assert page.troubles == []


def test_series_page_shows_instructions_only_if_counted(tmp_path: Path) -> None:
    counted = {"instructions": {"counter": "perf_event", "iterations": 9, "median": 1234567.0}}
    entries = [history_entry("r1"), history_entry("r2", created=2.0, **counted)]
    found = write_history(tmp_path / "history", entries)
    with asking(tmp_path, history=HistoryPlace(tmp_path / "history")) as client:
        assert '<td class="number">1,234,567</td>' in client.get(f"/series?id={found}").text
        rows = list(csv.DictReader(io.StringIO(client.get(f"/series.csv?id={found}").text)))
    assert [(row["instructions"], row["counter"]) for row in rows] == [("1234567.0", "perf_event"), ("", "")]


def test_series_page_marks_and_finds_changed_stack(tmp_path: Path) -> None:
    drivers = ["", *["1.2"] * 20, *["1.3"] * 11]
    entries = [
        one.replace(board=one.board.replace(parts={"driver": driver} if driver else None))
        for one, driver in zip(nightly_entries(), drivers, strict=True)
    ]
    series_id = write_history(tmp_path / "history", entries)
    with asking(tmp_path, history=HistoryPlace(tmp_path / "history")) as client:
        text = client.get(f"/series?id={series_id}").text
        assert re.findall(r"changed part of the board[^>]*>([^<]*)<", text) == ["driver 1.2 -&gt; 1.3"]
        assert '<span class="quiet">unknown</span>' in text
        chart = json.loads(unescape(re.findall(r'data-history="([^"]*)"', text)[0]))
        assert 21 in chart["remarks"]
        for query, count in (("driver 1.2 -> 1.3", 1), ("driver 1.3", 11), ("Driver 1", 31), ("1.4", 0)):
            asked = {"id": series_id, "q": query}
            found = list(csv.DictReader(io.StringIO(client.get("/series.csv", params=asked).text)))
            assert len(found) == count, query
            page = client.get("/series", params=asked).text
            assert page.count('<td class="time">') == count

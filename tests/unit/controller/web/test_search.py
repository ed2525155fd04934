"""Test the search for cases and sessions."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.web import asking, write_record, write_suite

from hil.controller.web.index.index import IndexWriter, NamedRow
from hil.controller.web.session.case_search import SearchQuery, parse_words, search_cases
from hil.controller.web.text.entries import CaseEntry, SessionEntry
from hil.controller.web.text.parameters import InvalidParameter

LAYERS = (("first", "Add", "PASS"), ("Dense_7", "Gemm", "FAIL"), ("later", "Relu", "FAIL"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    cases = [
        {"id": "relu", "model": "mobilenet", "board": "pi-1"},
        {"id": "conv_relu", "model": "mobilenet", "board": "pi-1", "outcome": "FAIL", "message": "7 of 512 differ"},
        {"id": "gemm", "model": "ResNet", "board": "pi-2", "outcome": "RUN_CRASH", "message": "worker died: relu"},
        {"id": "whole", "model": "resnet", "board": "pi-2", "op": "", "outcome": "FAIL"},
    ]
    write_suite(tmp_path, "monday", cases, suite="nets", started=1.7e9)
    write_suite(tmp_path, "tuesday", cases[:2], suite="nets", started=1.7e9 + 86400)
    layers = [
        {"name": name, "op": op, "depth": number, "isolated": {"outcome": outcome}, "cumulative": None}
        for number, (name, op, outcome) in enumerate(LAYERS)
    ]
    bisection = {"layers": layers, "model": "nets/resnet.onnx", "created": 1.7e9 + 2 * 86400, "finished": True}
    write_record(tmp_path / "bisect" / "bisect.json", bisection)
    return tmp_path


def search(client: TestClient, q: str, **other: Any) -> dict[str, Any]:
    answer = client.get("/api/v1/search", params={"q": q, **other})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def list_names(document: dict[str, Any]) -> list[str]:
    return [one["case"]["name"] for one in document["cases"]]


@pytest.mark.parametrize(
    ("q", "names"),
    [
        ("relu", ["relu", "conv_relu", "gemm"]),  # whole name, part of the name, message
        ("CONV", ["conv_relu"]),
        ("mobilenet", ["conv_relu", "relu"]),  # failing cases first
        ("pi-2 crash", ["gemm"]),
        ("512 differ", ["conv_relu"]),
        ("outcome:fail", ["Dense_7", "later", "conv_relu", "whole"]),  # newest first
        ("board:relu", []),
        ("message:relu", ["gemm"]),
        ("layer:dense", ["Dense_7", "whole"]),
        ("dense_7", ["Dense_7", "whole"]),
        ("lu", ["conv_relu", "relu", "gemm"]),  # shorter than a trigram
        ('"; drop table', []),
        ("", []),
    ],
)
def test_search_finds_cases_by_every_field(root: Path, q: str, names: list[str]) -> None:
    with asking(root) as client:
        assert list_names(search(client, q)) == names


def test_search_shows_newest_result_with_layer(root: Path) -> None:
    with asking(root) as client:
        first = search(client, "conv_relu")
        [whole] = search(client, "layer:dense pi-2")["cases"]
        page = client.get("/search?q=layer:dense pi-2").text
        table = client.get("/search.csv?q=layer:dense pi-2").text
        sessions = search(client, "nets")["sessions"]
    [hit] = first["cases"]
    assert (hit["session"]["id"], hit["results"], hit["layer"]) == ("tuesday", 2, "")
    assert (whole["layer"], whole["session"]["id"]) == ("Dense_7", "monday")
    assert "<td>Dense_7</td>" in page and table.splitlines()[1].startswith("whole,FAIL,Dense_7")
    assert [one["id"] for one in sessions] == ["tuesday", "monday"]


def test_search_pages_and_limits_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_suite(tmp_path, "s", [{"id": f"layer-{number:03d}"} for number in range(120)])
    with asking(tmp_path) as client:
        first, last = (search(client, "layer", page=page) for page in (1, 3))
        assert (len(first["cases"]), len(last["cases"]), first["total"], first["pages"]) == (50, 20, 120, 3)
        assert not first["is_cut"]
        monkeypatch.setattr("hil.controller.web.session.case_search.MAX_RESULTS", 100)
        cut = search(client, "layer")
        assert (cut["total"], cut["is_cut"]) == (100, True) and "add words" in client.get("/search?q=layer").text
        assert client.get("/search", params={"q": "a " * 9}).status_code == 400


@pytest.fixture(scope="module")
def large_index(tmp_path_factory: pytest.TempPathFactory) -> sqlite3.Connection:
    path = tmp_path_factory.mktemp("index") / "index.sqlite"
    with IndexWriter(path) as writer:
        for session in range(100):
            cases = [
                CaseEntry(
                    name=f"net{number % 40}_layer_{number}",
                    number=number,
                    model=f"net{number % 40}",
                    board=f"pi{session % 10}",
                    outcome="FAIL" if number % 7 == 0 else "PASS",
                    message=f"{session * 1000 + number} of 512 elements differ" if number % 7 == 0 else "",
                )
                for number in range(1000)
            ]
            entry = SessionEntry(f"s{session}", "suite", "nets", created=1.7e9 + session)
            writer.write(0, path.parent, entry, cases, stamp="")
    database = sqlite3.connect(path)
    database.row_factory = NamedRow
    return database


@pytest.mark.ci
@pytest.mark.parametrize("q", ["net7", "fail pi3", "99994 elements", "layer_776 pi3 pass", "nothing"])
def test_search_of_100_000_cases_is_fast(large_index: sqlite3.Connection, q: str) -> None:
    times = []
    for _ in range(3):
        begun = time.process_time()
        found = search_cases(large_index, SearchQuery(q))
        times.append(time.process_time() - begun)
    assert min(times) < 0.5 and (found.total > 0) == (q != "nothing")


@pytest.mark.parametrize(("q", "near"), [("nope:abc", ""), ("conv bord:pi", "did you mean 'board'? ")])
def test_search_rejects_unknown_field(q: str, near: str) -> None:
    with pytest.raises(InvalidParameter, match="unknown field") as caught:
        parse_words(q)
    assert caught.value.hint.startswith(f"{near}expected one of case, model")


@pytest.mark.parametrize("q", ["y:0", "std::bad_alloc", "identity:0", "failed:", ":abc", "http://a"])
def test_search_accepts_colons_in_text(q: str) -> None:
    assert [one.text for one in parse_words(q)] == [q]

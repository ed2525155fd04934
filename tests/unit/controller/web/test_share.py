"""Test saved pages: which pages, how many rows, and who has access."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from support.web import asking, write_record, write_run, write_suite

from hil.controller.web.pages import share
from hil.controller.web.text import requests

CASES, LAYERS = 250, 600


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shared")
    write_suite(root, "nightly", [{"id": f"case-{number}"} for number in range(CASES)])
    write_run(root, "one", [{"name": "model"}])
    finding = {"outcome": "PASS", "reason": ""}
    layers = [
        {"name": f"layer-{at}", "op": "Relu", "nodes": [f"layer-{at}"], "isolated": finding} for at in range(LAYERS)
    ]
    write_record(root / "halves/bisect.json", {"schema": 1, "model": "m.onnx", "layers": layers})
    return root


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[TestClient]:
    with asking(root) as client:
        yield client


def saved(client: TestClient, page: str) -> str:
    answer = client.get("/share", params={"page": page})
    assert answer.status_code == 200, answer.text
    assert re.fullmatch(r'attachment; filename="hil-[\w.-]+\.html"', answer.headers["content-disposition"])
    return answer.text


@pytest.mark.parametrize("page", ["/", "/?q=nightly", "/session?id=nightly", "/case?id=one&case=model", "/traces"])
def test_saved_page_omits_server_addresses(client, page):
    text = saved(client, page)
    assert "data-saved" in text and "works offline" in text
    assert not re.search(r'(?:src|href|action|hx-get|data-live)="/', text)
    assert "<style>" in text and "<script>" in text and "var htmx" not in text
    assert "<form" not in text or "disabled" in text
    assert "Save this page" not in text and "Save this page" in client.get(page).text


@pytest.mark.ci
def test_saved_page_includes_whole_table_up_to_limit(client, monkeypatch):
    def rows(text: str) -> int:
        return len(set(re.findall(r"case-\d+", text)))

    assert rows(client.get("/session?id=nightly").text) == 100
    assert rows(saved(client, "/session?id=nightly")) == CASES
    assert rows(saved(client, "/session?id=nightly&q=case-1")) == 111
    for page, usual in (("/session?id=halves", 500), ("/graph?id=halves", 100)):
        for text, count in ((client.get(page).text, usual), (saved(client, page), LAYERS)):
            assert len(re.findall(r"<tr\b[^>]*>(?:(?!</tr>).)*>layer-\d+<", text, re.DOTALL)) == count
    monkeypatch.setattr(requests, "SAVED_ROWS", 200)
    text = saved(client, "/session?id=nightly")
    assert rows(text) == 200
    assert "This file contains page 1 of 2 of this table with 250 rows" in text


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("", "not a page of this server"),
        ("/share?page=/", "not a page of this server"),
        ("//example.org/", "not a page of this server"),
        ("https://example.org/", "not a page of this server"),
        ("/\\example.org", "not a page of this server"),
        ("/nothing", "open it to see the error"),
        ("/session?id=none", "open it to see the error"),
        ("/events", "/events is not a page: text/event-stream"),
        ("/static/hil.js", "/static/hil.js is not a page"),
        ("/%00?x=\u00e9", "open it to see the error"),
    ],
)
def test_share_rejects_other_addresses(client, page, said):
    answer = client.get("/share", params={"page": page})
    assert answer.status_code == 404 and said in answer.text


def test_share_rejects_page_with_server_error(root, monkeypatch, caplog):
    with asking(root) as client:

        def fail(*_: object) -> None:
            raise KeyError("a fault of our own")

        monkeypatch.setattr("hil.controller.web.pages.traces.traces.get_site", fail)
        answer = client.get("/share", params={"page": "/traces"})
    assert answer.status_code == 404 and "open it to see the error" in answer.text
    assert "a fault of our own" in caplog.text and "/traces" in caplog.text


def test_share_rejects_page_above_size_limit(client, monkeypatch):
    monkeypatch.setattr(share, "MAX_BYTES", 1000)
    answer = client.get("/share", params={"page": "/"})
    assert answer.status_code == 404 and "the page is larger than 1 kB" in answer.text


def test_share_requires_token_of_page(root):
    with asking(root, token="secret", host="0.0.0.0") as client:
        client.follow_redirects = False
        assert client.get("/share", params={"page": "/"}).status_code == 401
        for given in ({"authorization": "Bearer wrong"}, {}):
            assert client.get("/share", params={"page": "/"}, headers=given).status_code == 401
        answer = client.get("/share", params={"page": "/"}, headers={"authorization": "Bearer secret"})
        assert answer.status_code == 200 and "models" in answer.text and "secret" not in answer.text
        # The token in the page parameter does not grant access.
        assert client.get("/share", params={"page": "/?token=secret"}).status_code == 401

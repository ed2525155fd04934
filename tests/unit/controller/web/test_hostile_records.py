"""Test pages with hostile records: only the templates' elements appear, and no page fails."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.web import asking
from support.web_hostile import PAYLOADS, hostile_root, records, write_sessions
from support.web_pages import Crawl, check_page, of_templates, routes

ALLOWED = of_templates()


def crawl(*roots: Path, most: int = 250) -> list[str]:
    """Check all pages of directories and return their addresses. Exceptions of routes are raised."""
    with asking(*roots) as client:
        found = Crawl(client, most=most)
        found.start("/", *routes())
        for address, text in found.pages():
            check_page(text, ALLOWED, address)
    assert found.failures == []
    return found.visited


# The other payloads differ only in browsers; the templates escape all of them alike.
OFTEN = ("script", "quotes")


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.slow]) for name in PAYLOADS]
)
def test_pages_escape_record_texts(tmp_path: Path, name: str) -> None:
    visited = crawl(hostile_root(tmp_path, PAYLOADS[name]))
    kinds = {
        part for address in visited for part in ("run", "suite", "bench", "bisect", "trace") if f"id={part}" in address
    }
    assert kinds == {"run", "suite", "bench", "bisect", "trace"}


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("name", ["script", "quotes", "half", "turned"])
def test_pages_escape_record_keys(tmp_path: Path, name: str) -> None:
    crawl(hostile_root(tmp_path, PAYLOADS[name], keys=True))


# Unexpected values: texts, extreme numbers, other types.
ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        [0, -1, 2**63, 10**400, 1e308, -0.0, float("nan"), float("inf"), "nan", "-inf", "1e999", "12", [], {}]
    ),
    st.sampled_from(list(PAYLOADS.values())).filter(lambda text: len(text) < 1000),
    st.text(st.characters(exclude_categories=[]), max_size=20),
    st.recursive(
        st.integers() | st.text(max_size=3),
        lambda of: st.lists(of, max_size=3) | st.dictionaries(st.text(max_size=3), of, max_size=3),
        max_leaves=5,
    ),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all values of a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([path] if path else []), *(one for key, item in inner for one in places(item, (*path, key)))]


RECORDS = records()
PLACES = places(RECORDS)


@st.composite
def damaged(draw: st.DrawFn) -> dict[str, Any]:
    """Draw records with some values replaced or deleted."""
    documents = copy.deepcopy(RECORDS)
    for path in draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=8)):
        value: Any = documents
        try:
            for key in path[:-1]:
                value = value[key]
            if draw(st.booleans()):
                value[path[-1]] = draw(ODD)
            elif len(path) > 1:
                del value[path[-1]]
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change removed it
    return documents


# Skip shrinking: each attempt crawls all pages.
@pytest.mark.slow  # a minute: every page of every damaged record
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(damaged())
def test_pages_survive_damaged_records(documents: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            json.dumps(documents)
        except ValueError:
            return  # Python cannot write such a large number
        write_sessions(Path(folder), documents)
        crawl(Path(folder), most=60)


@pytest.mark.ci
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b"1" * 5000,
        b'{"schema": 99}',
        b'{"cases": 1}',
        b'{"a":"' + b"x" * 1_000_000 + b'"}',
    ],
)
def test_pages_survive_invalid_record_files(tmp_path: Path, data: bytes) -> None:
    for name in ("run", "suite", "bench", "bisect", "study", "trace", "matrix", "profile"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.json").write_bytes(data)
    (tmp_path / "suite" / "results.jsonl").write_bytes(data + b"\n" + data)
    crawl(tmp_path)


@pytest.mark.parametrize("name", ["ends", "script"])
def test_saved_pages_escape_record_texts(tmp_path: Path, name: str) -> None:
    case = urlencode({"id": "run", "case": PAYLOADS[name]})
    pages = ["/", "/session?id=run", f"/case?{case}", f"/tensors?{case}", "/graph?id=bisect", "/compare?a=run&b=bench"]
    with asking(hostile_root(tmp_path, PAYLOADS[name])) as client:
        for page in pages:
            answer = client.get("/share", params={"page": page})
            assert answer.status_code == 200 and "attachment" in answer.headers["content-disposition"], page
            check_page(answer.text, ALLOWED, f"/share {page}")
        for page in ("/share?page=/", "/%73hare?page=/", "//evil.example/", "/\\evil.example", "/events", "http://x/"):
            assert client.get("/share", params={"page": page}).status_code == 404


@pytest.mark.slow
@pytest.mark.ci
def test_pages_skip_named_pipes(tmp_path: Path) -> None:
    hostile_root(tmp_path, "x")
    os.mkfifo(tmp_path / "hil-annotations.jsonl")
    for name in ("suite/results.jsonl", "run/run.json", "bench/bench.json", "bisect/bisect.json"):
        with asking(tmp_path) as client:
            (tmp_path / name).unlink()
            os.mkfifo(tmp_path / name)
            found = Crawl(client, most=40)
            kind = name.partition("/")[0]
            found.start("/history", f"/session?id={kind}", f"/graph?id={kind}", f"/case?id={kind}&case=x")
            for address, text in found.pages():
                check_page(text, ALLOWED, address)
            assert found.failures == []
    crawl(tmp_path, most=60)

"""Console lines of a session on its page, with a search and as CSV."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from support.web import asking, write_run

LINES: list[dict[str, Any]] = [
    {"host_ns": 5_000_000_000, "board_ns": 100, "time_s": 1.7e9, "kind": "output", "text": "Booting <Linux>"},
    {"host_ns": 6_000_000_000, "time_s": 1.7e9 + 1, "kind": "output", "text": "Kernel panic - not syncing: \x1b[31m"},
    {"host_ns": 7_000_000_000, "time_s": 1.7e9 + 2, "kind": "note", "text": "connection lost; reconnecting"},
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = write_run(tmp_path, "a") / "consoles"
    folder.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    (folder / "rpi5.jsonl").write_text(f"{text}not json\n{{}}\n")
    (folder.parent / "other.jsonl").write_text(text)
    return tmp_path


def test_session_links_its_consoles(root: Path) -> None:
    with asking(root) as client:
        page = client.get("/session?id=a").text
    assert 'file=consoles%2Frpi5.jsonl">rpi5.jsonl</a>' in page


def test_console_page_shows_lines_and_causes(root: Path) -> None:
    with asking(root) as client:
        page = client.get("/console?id=a&file=consoles/rpi5.jsonl").text
    assert "3 lines." in page
    assert "<code>Booting &lt;Linux&gt;</code>" in page
    assert '<span class="outcome error">kernel panic</span>' in page
    assert "\x1b" not in page
    assert page.count("<code>") == 2


def test_console_page_searches_text(root: Path) -> None:
    with asking(root) as client:
        page = client.get("/console?id=a&file=consoles/rpi5.jsonl&q=PANIC").text
    assert "1 line." in page
    assert "Booting" not in page


def test_console_page_leaves_out_impossible_clocks(root: Path) -> None:
    lines = [{**LINES[0], name: sign * 10**400} for name in ("host_ns", "board_ns") for sign in (1, -1)]
    lines += [{**LINES[0], "time_s": 1e300}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (root / "a" / "consoles" / "rpi5.jsonl").write_text(text)
    with asking(root) as client:
        answer = client.get("/console?id=a&file=consoles/rpi5.jsonl")
    assert answer.status_code == 200 and "1 line." in answer.text


def test_console_csv_contains_the_same_lines(root: Path) -> None:
    with asking(root) as client:
        answer = client.get("/console.csv?id=a&file=consoles/rpi5.jsonl&q=kernel")
    (row,) = csv.DictReader(io.StringIO(answer.text, newline=""))
    assert (row["line"], row["pattern"], row["kind"]) == ("2", "kernel panic", "output")
    assert row["text"] == "Kernel panic - not syncing: \\x1b[31m"


@pytest.mark.parametrize("file", ["", "consoles/other.jsonl", "other.jsonl", "consoles/../other.jsonl", "run.json"])
def test_console_of_other_file_is_not_found(root: Path, file: str) -> None:
    with asking(root) as client:
        answer = client.get("/console", params={"id": "a", "file": file})
    assert answer.status_code == 404

"""Pages of stored gates."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from support.histories import history_entry
from support.web import asking, write_record, write_run
from support.web_hostile import PAYLOADS
from support.web_pages import Crawl, check_page, of_templates

from hil.controller.storage.history.place import HistoryPlace
from hil.controller.storage.history.store import HistoryStore

ALLOWED = of_templates()


def write_gate(root: Path, name: str, *verdicts: dict[str, Any], **values: Any) -> Path:
    """Write a gate with its run record, as `hil gate` does, and return the directory."""
    known = {"schema": 1, "id": name, "folder": "", "created": 1.7e9, "finished": True, "history": "h"}
    known |= {"baseline": "main", "commit": "feedfeedfeed", "min_effect": 0.02, "budget_s": 300.0, "exit_code": 1}
    known |= {"fail_on": ["regressed", "broken"], "unmeasured": [], "verdicts": list(verdicts)}
    write_run(root, name, command="hil gate --baseline main")
    write_record(root / name / "gate.json", {**known, **values})
    return root / name


def make_side(**values: Any) -> dict[str, Any]:
    known = {"commit": "1a2b3c4d5e6f", "run": "r1", "outcome": "PASS", "reason": "", "p50_ns": 2e6}
    return {**known, "compiler": "iree 3.13.0", "runtime": "iree 3.13.0", "program": "", **values}


def make_verdict(name: str, series: str = "m", **values: Any) -> dict[str, Any]:
    key = {"kind": "bench", "model": "m.onnx", "case": "m", "board": "orin", "runtime": "iree"}
    known = {"series": series, "key": key, "verdict": name, "reason": "slower", "suspect": "step"}
    return {**known, "new": make_side(run="r2", commit="feedfeedfeed"), "old": make_side(), **values}


REGRESSED = {"ratio": 1.05, "interval": {"low": 1.04, "high": 1.06, "level": 0.99}, "rounds": 8}


def test_gates_page_lists_gates_and_navigation_follows(tmp_path: Path) -> None:
    with asking(tmp_path) as client:
        assert 'href="/gates"' not in client.get("/").text
    write_gate(tmp_path, "g1", make_verdict("regressed", **REGRESSED), make_verdict("no change"))
    write_gate(tmp_path / "hil-gates", "g2", exit_code=4, created=1.6e9)
    with asking(tmp_path) as client:
        assert '<a href="/gates">Gates</a>' in client.get("/").text
        page = client.get("/gates").text
        assert "feedfeedf against main: 1 regressed, 1 no change" in page
        assert page.index("id=g1") < page.index("id=hil-gates%2Fg2")
        assert [one in page for one in ('class="outcome fail"', 'class="outcome board"')] == [True, True]


def test_gate_page_marks_known_failures(tmp_path: Path) -> None:
    write_gate(tmp_path, "g", make_verdict("broken", triage="known"), make_verdict("regressed", triage="fixed"))
    with asking(tmp_path) as client:
        page = client.get("/session?id=g").text
    assert '<span class="outcome quiet">broken (known)</span>' in page
    assert '<span class="outcome fail">regressed</span>' in page and "triage: fixed" in page


def test_gate_page_shows_verdicts_and_links_visible_runs(tmp_path: Path) -> None:
    with HistoryStore.open(tmp_path / "history", create=True) as store:
        store.add([history_entry()])
        known = store.series()[0].id
    write_run(tmp_path / "hil-runs", "r2")
    other = {"kind": "run", "model": "other.onnx", "case": "o", "board": "orin", "runtime": "iree"}
    verdicts = [make_verdict("regressed", known, **REGRESSED), make_verdict("new", old=None)]
    write_gate(tmp_path, "g", *verdicts, unmeasured=[other])
    with asking(tmp_path, history=HistoryPlace(tmp_path / "history")) as client:
        page = client.get("/session?id=g").text
        rows = list(csv.DictReader(io.StringIO(client.get("/session/table.csv?id=g").text)))
    assert '<span class="outcome fail">regressed</span>' in page and "1.040 to 1.060" in page
    assert 'href="/session?id=hil-runs%2Fr2">r2</a>' in page and "id=r1" not in page
    assert f'href="/series?id={known}"' in page and "/series?id=m" not in page
    assert "Not measured at this commit: other.onnx o" in page and "hil gate --baseline main" in page
    assert [row["Verdict"] for row in rows] == ["regressed", "new"]
    assert (rows[0]["Ratio"], rows[0]["Rounds"], rows[0]["New"], rows[1]["Baseline"]) == ("1.05", "8", "feedfeedf", "")


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ({"bisect": "make all"}, "--bisect &#39;make all&#39;"),
        ({"over": "driver=1,2", "bisect": "make"}, "--bisect make --over driver=1,2"),
        ({"over": "flag"}, "--over flag"),
        ({"over": "flag", "second_board": "lab 2"}, "--over flag --second-board &#39;lab 2&#39;"),
    ],
)
def test_interrupted_gate_shows_resume_command(tmp_path: Path, values: dict[str, str], options: str) -> None:
    given = dict(values)
    verdict = make_verdict("broken", second_board=given.pop("second_board", ""))
    write_gate(tmp_path, "g", verdict, finished=False, **given)
    with asking(tmp_path) as client:
        page = client.get("/session?id=g").text
    assert "unfinished" in page and f"hil gate --resume {tmp_path / 'g'} {options}" in page


def test_gate_page_shows_axis_and_candidate(tmp_path: Path) -> None:
    cause = {"axis": "flag", "candidates": [{"value": "-O2 -> -O3"}]}
    write_gate(tmp_path, "g", make_verdict("broken", cause=cause))
    with asking(tmp_path) as client:
        assert "first bad flag: -O2 -&gt; -O3" in client.get("/session?id=g").text


@pytest.mark.parametrize("change", [{"verdicts": [{"verdict": "x"}]}, {"schema": 9}, {"exit_code": "no"}])
def test_damaged_gate_is_listed_with_reason(tmp_path: Path, change: dict[str, Any]) -> None:
    write_gate(tmp_path, "g", **change)
    with asking(tmp_path) as client:
        for address in ("/gates", "/session?id=g"):
            page = client.get(address).text
            assert "gate.json cannot be read" in page, address
        assert client.get("/session/table.csv?id=g").status_code == 404


@pytest.mark.parametrize("name", ["script", "quotes", "turned", "controls", "half"])
def test_gate_pages_escape_texts(tmp_path: Path, name: str) -> None:
    text = PAYLOADS[name]
    key = dict.fromkeys(("kind", "model", "case", "function", "board", "runtime", "flow"), text)
    side = make_side(**dict.fromkeys(("commit", "run", "outcome", "reason", "compiler", "runtime", "again"), text))
    texts = {"series": text, "key": key, "reason": text, "new": side, "old": side, "changes": [text]}
    values = {"id": text, "baseline": text, "commit": text, "history": text, "unmeasured": [key], "bisect": text}
    write_gate(tmp_path, "g", make_verdict("broken", **texts), finished=False, **values)
    with asking(tmp_path, history=HistoryPlace(tmp_path / "history")) as client:
        crawl = Crawl(client, most=5)
        crawl.start("/gates", "/session?id=g", "/session/table.csv?id=g")
        for address, page in crawl.pages():
            check_page(page, ALLOWED, address)
    assert not crawl.failures


def test_gate_page_survives_invalid_files(tmp_path: Path) -> None:
    folder = write_gate(tmp_path, "g", make_verdict("broken"))
    for data in (b"[" * 100_000, b"null"):
        (folder / "gate.json").write_bytes(data)
        with asking(tmp_path) as client:
            assert "gate.json cannot be read" in client.get("/session?id=g").text

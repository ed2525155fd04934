"""Pages of stored evaluations."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from support.web import asking, write_record, write_run
from support.web_hostile import PAYLOADS
from support.web_pages import Crawl, check_page, of_templates

ALLOWED = of_templates()


def write_evaluation(root: Path, name: str, **values: Any) -> Path:
    """Write an evaluation with its run record, as `hil eval` does, and return the directory."""
    worst = {"name": "digit 7", "board": 0.0, "reference": 1.0, "board_answer": [1], "reference_answer": [7]}
    interval = {"low": -0.1, "high": -0.01, "level": 0.95, "method": "tango"}
    scores = {"board": 0.9, "reference": 0.95, "difference": -0.05, "interval": interval, "p_value": 0.02}
    known = {
        **{"schema": 1, "id": name, "folder": "", "created": 1.7e9, "finished": True, "name": "digits"},
        **{"settings": {"dataset": "digits.npz", "metric": "top1", "max_drop": 2.0}, "model": "digits.onnx"},
        "identity": {"samples": 100, "names": "n", "model": "", "reference_model": ""},
        **{"board": "orin", "runtime": "iree", "reference": "onnxruntime", "is_higher_better": True, "is_share": True},
        **{"evaluated": 80, "stopped_early": True, "allowed_drop": 0.02, "outcome": "FAIL", "reason": "too low"},
        **{"scores": {**scores, "differing": 4, "worst": [worst]}, "hint": "", "exit_code": 1},
    }
    write_run(root, name, [{"name": "digits", "outcome": "FAIL", "reason": "too low"}], command="hil eval digits.onnx")
    write_record(root / name / "eval.json", {**known, **values})
    return root / name


def test_session_page_shows_scores_and_worst_samples(tmp_path: Path) -> None:
    write_evaluation(tmp_path, "e")
    with asking(tmp_path) as client:
        page = client.get("/session?id=e").text
        rows = list(csv.DictReader(io.StringIO(client.get("/session/table.csv?id=e").text)))
        assert client.get("/case?id=e&case=digits").status_code == 200
        assert "eval" in client.get("/").text
    assert "top1: 90.00 % on the board, 95.00 % on the reference" in page
    assert "difference: -5.00 %, 95 % interval -10.00 % to -1.00 % (tango), McNemar p = 0.02; allowed drop" in page
    assert "samples: 80 of 100, the result was already clear; 4 answers differ from the reference onnxruntime" in page
    assert [(row["Sample"], row["Board"], row["Answer of the reference"]) for row in rows] == [
        ("digit 7", "0.0", "[7]")
    ]


def test_damaged_scores_leave_session_readable(tmp_path: Path) -> None:
    write_evaluation(tmp_path, "e", scores={"worst": [1, {"name": 3}]}, evaluated=None)
    with asking(tmp_path) as client:
        answer = client.get("/session?id=e")
    assert answer.status_code == 200 and "on the board" not in answer.text


@pytest.mark.parametrize("name", ["script", "quotes", "turned", "half"])
def test_pages_escape_texts_of_evaluations(tmp_path: Path, name: str) -> None:
    text = PAYLOADS[name]
    worst = {"name": text, "board": 0, "reference": 1, "board_answer": text, "reference_answer": [text]}
    scores = {"board": 0.9, "reference": 0.95, "difference": 0, "interval": None, "p_value": None, "differing": 1}
    settings = {"dataset": text, "metric": text}
    write_evaluation(tmp_path, "e", scores={**scores, "worst": [worst]}, settings=settings, reference=text, reason=text)
    with asking(tmp_path) as client:
        crawl = Crawl(client, most=5)
        crawl.start("/session?id=e", "/case?id=e&case=digits")
        for address, page in crawl.pages():
            check_page(page, ALLOWED, address)
    assert not crawl.failures

"""Output of `hil bundle run`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from hil.compare.criteria import parse_accept
from hil.compare.verdict import compare
from hil.controller.pipeline.records.record import verdict_record
from hil.controller.workloads.bundles.show import print_run
from hil.core.results import RunResult

CASE = json.loads((Path(__file__).parents[5] / "tests/support/web_records.json").read_text())["run"]["cases"][0]


def printed(capsys, outcome: str, verdict: dict[str, Any]) -> str:
    case = {**CASE, "name": "seed1", "outcome": outcome, "reason": verdict["reason"], "error": None, "device": None}
    print_run({"cases": [{**case, "verdicts": [verdict]}], "board": {}, "folder": ""})
    return " ".join(capsys.readouterr().out.split())


def test_print_run_shows_criteria_and_hints(capsys):
    expected = np.random.default_rng(0).normal(size=(64, 10)).astype(np.float32)
    results = RunResult("board", {"y": expected + np.float32(1e-3)}), RunResult("onnxruntime", {"y": expected})

    def verdict(text: str) -> dict[str, Any]:
        return verdict_record(compare(*results, accept=parse_accept([text])))

    assert "seed1, y: top1>=0.9: 1, met" in printed(capsys, "PASS", verdict("top1>=0.9"))
    failed = printed(capsys, "FAIL", verdict("max_abs<=1e-4"))
    assert "seed1, y: max_abs<=0.0001: 0.0010" in failed and "not met" in failed
    assert "hint try other inputs" in printed(capsys, "BLIND", verdict("max_abs<=100"))

"""Output of `hil bundle run`."""

from __future__ import annotations

import numpy as np
from support.run_records import run_case, run_record

from hil.compare.criteria import parse_accept
from hil.compare.verdict import compare
from hil.controller.pipeline.records.record import record_verdict
from hil.controller.records.outputs import StoredVerdict
from hil.controller.workloads.bundles.show import print_run
from hil.core.results import RunResult


def printed(capsys, outcome: str, verdict: StoredVerdict) -> str:
    known = {"name": "seed1", "outcome": outcome, "reason": verdict.reason, "error": None, "device": None}
    print_run(run_record(run_case(**known, verdicts=[verdict.to_json()]), board=None, folder=""))
    return " ".join(capsys.readouterr().out.split())


def test_print_run_shows_criteria_and_hints(capsys):
    expected = np.random.default_rng(0).normal(size=(64, 10)).astype(np.float32)
    results = RunResult("board", {"y": expected + np.float32(1e-3)}), RunResult("onnxruntime", {"y": expected})

    def verdict(text: str) -> StoredVerdict:
        return record_verdict(compare(*results, accept=parse_accept([text])))

    assert "seed1, y: top1>=0.9: 1, met" in printed(capsys, "PASS", verdict("top1>=0.9"))
    failed = printed(capsys, "FAIL", verdict("max_abs<=1e-4"))
    assert "seed1, y: max_abs<=0.0001: 0.0010" in failed and "not met" in failed
    assert "hint try other inputs" in printed(capsys, "BLIND", verdict("max_abs<=100"))


def test_print_run_shows_worst_statistics_of_exact_and_wrong_outputs(capsys):
    exact, wrong = np.ones(4, np.float32), np.full(4, 2, np.float32)
    results = RunResult("board", {"y": exact, "z": wrong}), RunResult("expected", {"y": exact, "z": exact})
    # The SQNR of y is infinite, which JSON stores as a string.
    assert "4 of 8 1 8388608 0 -" in printed(capsys, "FAIL", record_verdict(compare(*results)))

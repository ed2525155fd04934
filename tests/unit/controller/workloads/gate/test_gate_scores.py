"""The gate compares the scores of evaluations sample by sample."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.histories import history_entry

from hil.controller.records.base import make_record
from hil.controller.records.decisions.gate import GateScore, GateVerdict
from hil.controller.records.measurements.history import HistoryEntry
from hil.controller.storage.runs import RunStore
from hil.controller.workloads.gate.comparing.scores import compare_stored_scores
from hil.controller.workloads.gate.judge import find_direction, judge_case, needs_board
from hil.controller.workloads.gate.plan import GateCase


def write_evaluation(folder: Path, name: str, values: Sequence[float], **changes: Any) -> HistoryEntry:
    """Store an evaluation with a score per sample. Return the entry of a history."""
    run = RunStore(folder).create(name, {}, name)
    settings = {"dataset": "d.npz", "metric": "top1", **changes.pop("settings", {})}
    identity = {"samples": len(values), "names": "n", "model": "", "reference_model": "", **changes.pop("identity", {})}
    known = {
        **{"schema": 1, "id": run.id, "folder": "", "created": 1.0, "finished": True, "name": "m", "model": "m.onnx"},
        **{"settings": settings, "identity": identity, "board": "sim", "runtime": "iree", "reference": "onnx"},
        **{"is_higher_better": True, "is_share": True, "evaluated": len(values), "stopped_early": False},
        **{"allowed_drop": None, "scores": None, "outcome": "SKIP", "reason": "", "hint": "", "exit_code": 0},
    }
    (run.folder / "eval.json").write_text(json.dumps({**known, **changes}))
    sides = [{"value": value, "evidence": value} for value in values]
    lines = [{"name": str(number), "board": side, "reference": side} for number, side in enumerate(sides)]
    (run.folder / "samples.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    score = {"metric": "top1", "board": sum(values) / len(values), "reference": 1.0, "samples": len(values)}
    score |= {"is_higher_better": True, "is_share": True}
    return history_entry(run.id, folder=str(run.folder), outcome="SKIP", p50_ns=None, score=score)


def judge(old: HistoryEntry, new: HistoryEntry) -> GateVerdict:
    case = GateCase(new, old)
    assert not needs_board(case)
    return judge_case(case, None, compare_stored_scores(case))


def test_gate_judges_paired_difference_of_scores(tmp_path):
    good = write_evaluation(tmp_path, "a", [1.0] * 95 + [0.0] * 5)
    worse = write_evaluation(tmp_path, "b", [1.0] * 80 + [0.0] * 20)
    unclear = write_evaluation(tmp_path, "c", [1.0] * 93 + [0.0] * 7)
    found = judge(good, worse)
    assert found.verdict == "regressed" and found.score is not None
    assert (found.score.old, found.score.new, found.score.samples) == (0.95, 0.8, 100)
    assert found.score.interval is not None and found.score.interval.high < 0
    assert "score 80.00 %, 95.00 % at" in found.reason
    assert judge(worse, good).verdict == "improved"
    assert judge(good, unclear).verdict == "no change"
    assert judge(good, good).verdict == "no change"


def test_gate_pairs_samples_by_name(tmp_path):
    """An evaluation that stopped early has fewer samples."""
    good = write_evaluation(tmp_path, "a", [1.0] * 90 + [0.0] * 10)
    early = write_evaluation(tmp_path, "b", [1.0] * 60, identity={"samples": 100})
    found = judge(good, early)
    assert found.verdict == "no change" and found.score is not None
    assert (found.score.samples, found.score.old, found.score.new) == (60, 1.0, 1.0)


@pytest.mark.parametrize(
    ("identity", "reason"),
    [
        ({"contents": "x"}, "the dataset has changed"),
        ({"names": "x"}, "the dataset has changed"),
        ({"metric": "x"}, "the file of the metric has changed"),
    ],
)
def test_changed_dataset_or_metric_is_undecided(tmp_path, identity, reason):
    good = write_evaluation(tmp_path, "a", [1.0] * 10)
    other = write_evaluation(tmp_path, "b", [0.0] * 10, identity=identity)
    found = judge(good, other)
    assert found.verdict == "undecided" and found.reason.startswith(reason)


def test_missing_samples_are_undecided(tmp_path):
    good = write_evaluation(tmp_path, "a", [1.0] * 10)
    missing = good.replace(run="gone", folder=str(tmp_path / "gone"))
    found = judge(missing, good)
    assert found.verdict == "undecided" and "gone is missing" in found.reason


def test_gate_does_not_run_file_of_metric(tmp_path):
    (tmp_path / "metric.py").write_text("raise SystemExit('must not run')\n")
    settings = {"metric": str(tmp_path / "metric.py")}
    good, worse = (
        write_evaluation(tmp_path, name, values, settings=settings, is_share=False)
        for name, values in (("a", [0.9, 0.8] * 20), ("b", [0.7, 0.5] * 20))
    )
    assert judge(good, worse).verdict == "regressed"


@pytest.mark.parametrize("evidence", ["many", None, [1, 2], {}, pytest.param(10**400, id="huge")])
def test_samples_that_do_not_fit_metric_are_undecided(tmp_path, evidence):
    good, bad = (write_evaluation(tmp_path, name, [1.0] * 10) for name in "ab")
    path = Path(bad.folder) / "samples.jsonl"
    path.write_text(path.read_text().replace('"evidence": 1.0', f'"evidence": {json.dumps(evidence)}'))
    found = judge(good, bad)
    assert found.verdict == "undecided" and "do not fit top1" in found.reason


def test_different_scores_without_interval_are_undecided(tmp_path):
    settings = {"metric": "mse"}
    good, worse = (write_evaluation(tmp_path, name, [value], settings=settings) for name, value in (("a", 1), ("b", 9)))
    found = judge(good, worse)
    assert found.verdict == "undecided" and "no interval" in found.reason
    assert judge(good, good).verdict == "no change"


def test_failed_limit_is_broken(tmp_path):
    """--max-drop compares with the reference of the same model."""
    good = write_evaluation(tmp_path, "a", [1.0] * 10)
    failed = write_evaluation(tmp_path, "b", [1.0] * 10).replace(outcome="FAIL", reason="below the limit")
    found = judge(good, failed)
    assert (found.verdict, found.reason) == ("broken", "FAIL: below the limit")


@pytest.mark.parametrize(
    ("old", "new", "ends", "is_higher_better", "direction"),
    [
        (1.0, 2.0, (0.5, 1.5), True, "better"),
        (1.0, 2.0, (0.5, 1.5), False, "worse"),
        (1.0, 0.5, (-0.9, -0.1), False, "better"),
        (1.0, 2.0, (-0.5, 2.5), True, "same"),
        (1.0, 2.0, None, True, "same"),
        (1.0, "nan", None, True, "worse"),
        ("nan", 1.0, None, True, "better"),
        ("nan", "nan", None, True, "same"),
        (1.0, None, None, False, "worse"),
    ],
)
def test_find_direction_of_score(old, new, ends, is_higher_better, direction):
    interval = None if ends is None else {"low": ends[0], "high": ends[1], "level": 0.99}
    known = {"old": old, "new": new, "difference": 0.0, "interval": interval, "samples": 2, "is_share": False}
    score = make_record({**known, "is_higher_better": is_higher_better}, GateScore)
    assert find_direction(score) == direction

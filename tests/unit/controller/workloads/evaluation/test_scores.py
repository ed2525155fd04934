"""Scores of finished samples with values that are not numbers, and limits by kind of metric."""

from __future__ import annotations

import math

import pytest

from hil.controller.analysis.evaluation.metric_choice import choose_metric
from hil.controller.records.base import make_record
from hil.controller.records.decisions.evaluation import EvaluatedSample, SampleSide
from hil.controller.workloads.evaluation.scores import allow_drop, compute_scores, judge_scores


def build_sample(name: str, board: float, reference: float) -> EvaluatedSample:
    sides = (SampleSide(value=value, evidence=value) for value in (board, reference))
    board_side, reference_side = sides
    sample = EvaluatedSample(name=name, board=board_side, reference=reference_side)
    return make_record(sample.to_json(), EvaluatedSample)


def test_nan_on_board_fails_and_is_worst() -> None:
    metric = choose_metric("mse")
    samples = [build_sample("a", 2, 1), build_sample("b", math.nan, 1), build_sample("c", 1, 1)]
    scores = compute_scores(metric, samples, total=3, seed=0, stopped_early=False)
    assert scores is not None and scores.interval is None and scores.differing == 2
    assert [one.name for one in scores.worst] == ["b", "a"]
    assert judge_scores(metric, scores, 100.0) == "FAIL"


@pytest.mark.parametrize(("name", "allowed"), [("top1", 0.02), ("map", 0.02), ("wer", 0.02), ("mse", 0.01)])
def test_allowed_drop_depends_on_metric(name: str, allowed: float) -> None:
    assert allow_drop(choose_metric(name), 0.5, 2.0) == pytest.approx(allowed)
    assert allow_drop(choose_metric(name), 0.5, None) is None

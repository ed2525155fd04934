"""Compute the scores of finished samples, and judge the board's score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from hil.controller.analysis.evaluation.metrics import Metric
from hil.controller.analysis.evaluation.paired import (
    LEVEL,
    compute_bootstrap_interval,
    compute_mcnemar_p_value,
    compute_tango_interval,
)
from hil.controller.analysis.evaluation.sequential import Values, bound_mean, decide_mean
from hil.controller.records.base import parse_number
from hil.controller.records.decisions.evaluation import EvaluatedSample, EvaluationScores, ScoreInterval, WorstSample
from hil.core.results import Outcome
from hil.core.tensors import Array

_WORST = 10
_ROUNDING = 1e-12


def compute_scores(
    metric: Metric,
    samples: Sequence[EvaluatedSample],
    *,
    total: int,
    seed: int,
    stopped_early: bool,
    level: float = LEVEL,
) -> EvaluationScores | None:
    """Return the scores of samples, or None without samples.

    Args:
        total: number of samples in the dataset.
        seed: seed of the bootstrap.
        stopped_early: True if the evaluation stopped early because of its scores. The interval is then valid for any
            stopping time.
        level: probability that the interval contains the true difference.
    """
    if not samples:
        return None
    board = metric.scorer([one.board.evidence for one in samples])
    reference = metric.scorer([one.reference.evidence for one in samples])
    weights = np.ones(len(samples))
    scores = board(weights), reference(weights)
    only_board, only_reference = _count_discordant(metric, samples)
    interval: ScoreInterval | None = None
    if stopped_early and metric.bounds is not None:
        ends = sorted(_to_difference(metric, one) for one in bound_mean(_to_unit(metric, samples), total, level))
        interval = ScoreInterval(low=ends[0], high=ends[1], level=level, method="betting")
    elif only_board is not None:
        low, high = compute_tango_interval(only_board, only_reference or 0, len(samples), level)
        interval = ScoreInterval(low=low, high=high, level=level, method="tango")
    elif found := compute_bootstrap_interval(board, reference, len(samples), seed=seed, level=level):
        interval = ScoreInterval(low=found[0], high=found[1], level=level, method="bootstrap")
    losing = sorted(
        (one for one in samples if _compute_gain(metric, one) < 0), key=lambda one: _compute_gain(metric, one)
    )
    return EvaluationScores(
        board=scores[0],
        reference=scores[1],
        difference=scores[0] - scores[1],
        interval=interval,
        # The exact test is not valid after an early stop, because it assumes that the number of samples does not depend
        # on the data.
        p_value=None
        if only_board is None or stopped_early
        else compute_mcnemar_p_value(only_board, only_reference or 0),
        differing=sum(_is_different(one) for one in samples),
        worst=[
            WorstSample(
                name=one.name,
                board=one.board.value,
                reference=one.reference.value,
                board_answer=one.board.answer,
                reference_answer=one.reference.answer,
            )
            for one in losing[:_WORST]
        ],
    )


def decide_early(
    metric: Metric, samples: Sequence[EvaluatedSample], *, total: int, max_drop: float | None
) -> Literal["PASS", "FAIL", ""]:
    """Return the outcome if it is already certain before all samples have run, otherwise "".

    Args:
        total: number of samples in the dataset.
        max_drop: value of ``--max-drop`` in percent; None: no limit.
    """
    if max_drop is None or metric.bounds is None or not samples:
        return ""
    decided = decide_mean(_to_unit(metric, samples), total, 0.5 - max_drop / 200)
    if not decided:
        return ""
    return "PASS" if decided == "above" else "FAIL"


def allow_drop(metric: Metric, reference: float, max_drop: float | None) -> float | None:
    """Return the largest loss that passes, in units of the score.

    ``--max-drop`` is a percentage of the metric's range, so for shares it means percentage points. For metrics without
    a range, it is a percentage of the reference's score.
    """
    if max_drop is None:
        return None
    scale = abs(reference)
    if metric.bounds is not None:
        scale = metric.bounds[1] - metric.bounds[0]
    elif metric.is_share:
        scale = 1.0
    return max_drop / 100 * scale


def judge_scores(metric: Metric, scores: EvaluationScores, allowed: float) -> Outcome:
    """Judge the scores of all samples. A score that is not a number fails."""
    board, reference = parse_number(scores.board), parse_number(scores.reference)
    assert board is not None and reference is not None
    loss = reference - board if metric.is_higher_better else board - reference
    return Outcome.PASS if loss <= allowed + _ROUNDING else Outcome.FAIL


def align_names(board: Mapping[str, Array], reference: Mapping[str, Array]) -> Mapping[str, Array]:
    """Return the board's outputs with the names of the reference's outputs, matched by position if they differ."""
    if board.keys() == reference.keys() or len(board) != len(reference):
        return board
    return dict(zip(reference, board.values(), strict=True))


def _compute_gain(metric: Metric, sample: EvaluatedSample) -> float:
    """Return the difference by which the board's score is better than the reference's; negative infinity for NaN."""
    board, reference = parse_number(sample.board.value), parse_number(sample.reference.value)
    assert board is not None and reference is not None
    gain = board - reference if metric.is_higher_better else reference - board
    return -math.inf if math.isnan(gain) and not math.isnan(reference) else 0.0 if math.isnan(gain) else gain


def _to_unit(metric: Metric, samples: Sequence[EvaluatedSample]) -> Values:
    """Return the gains of a bounded metric, scaled to 0..1, where 0.5 means no difference."""
    assert metric.bounds is not None
    span = metric.bounds[1] - metric.bounds[0]
    return np.array([_compute_gain(metric, one) for one in samples], np.float64) / (2 * span) + 0.5


def _to_difference(metric: Metric, unit: float) -> float:
    """Convert a mean of :func:`_to_unit` to a difference of scores, board - reference."""
    assert metric.bounds is not None
    gain = (unit - 0.5) * 2 * (metric.bounds[1] - metric.bounds[0])
    return gain if metric.is_higher_better else -gain


def _count_discordant(metric: Metric, samples: Sequence[EvaluatedSample]) -> tuple[int | None, int | None]:
    """Return the number of samples that only the board predicts correctly, and the same for the reference.

    Both are None if the metric does not score samples with 0 or 1.
    """
    pairs = [(parse_number(one.board.value), parse_number(one.reference.value)) for one in samples]
    if metric.bounds != (0.0, 1.0) or not {value for pair in pairs for value in pair} <= {0.0, 1.0}:
        return None, None
    return pairs.count((1.0, 0.0)), pairs.count((0.0, 1.0))


def _is_different(sample: EvaluatedSample) -> bool:
    if sample.board.answer is None and sample.reference.answer is None:
        return sample.board.value != sample.reference.value
    return bool(sample.board.answer != sample.reference.answer)

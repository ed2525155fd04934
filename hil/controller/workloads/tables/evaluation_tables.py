"""Tables of an evaluation: the scores, and a row per sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hil.controller.records.base import parse_number
from hil.controller.records.decisions.evaluation import EvaluatedSample, EvaluationRecord
from hil.controller.workloads.suites.reports.tables import ResultTable


def make_score_table(record: EvaluationRecord) -> ResultTable:
    """Make a row with the scores of an evaluation. Scores are empty without finished samples."""
    scores, settings = record.scores, record.settings
    interval = scores.interval if scores is not None else None
    row: dict[str, Any] = {
        "id": record.id,
        "model": record.model,
        "dataset": settings.dataset,
        "metric": settings.metric,
        "board": record.board,
        "runtime": record.runtime,
        "reference": record.reference,
        "evaluated": record.evaluated,
        "samples": record.identity.samples,
        "board_score": scores and parse_number(scores.board),
        "reference_score": scores and parse_number(scores.reference),
        "difference": scores and parse_number(scores.difference),
        "low": interval and interval.low,
        "high": interval and interval.high,
        "level": interval and interval.level,
        "method": interval and interval.method,
        "p_value": scores and scores.p_value,
        "differing": scores and scores.differing,
        "allowed_drop": parse_number(record.allowed_drop),
        "outcome": record.outcome and record.outcome.value,
        "reason": record.reason,
    }
    return ResultTable(list(row), [list(row.values())])


def make_sample_table(samples: Sequence[EvaluatedSample]) -> ResultTable:
    """Make a row per finished sample: the scores on the board and on the reference, and both answers."""
    columns = ("name", "board", "reference", "difference", "board_answer", "reference_answer")
    return ResultTable(columns, [_describe_sample(sample) for sample in samples])


def _describe_sample(sample: EvaluatedSample) -> Sequence[Any]:
    board, reference = parse_number(sample.board.value), parse_number(sample.reference.value)
    difference = None if board is None or reference is None else board - reference
    return sample.name, board, reference, difference, sample.board.answer, sample.reference.answer

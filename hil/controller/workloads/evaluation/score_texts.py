"""Texts of scores, for the terminal and web pages."""

from __future__ import annotations

from hil.controller.records.decisions.evaluation import EvaluationRecord, EvaluationScores
from hil.controller.storage.screen.texts import format_score


def describe_scores(scores: EvaluationScores, *, is_share: bool) -> str:
    """Return both scores in one line."""
    board, reference = (format_score(value, is_share) for value in (scores.board, scores.reference))
    return f"{board} on the board, {reference} on the reference"


def describe_difference(scores: EvaluationScores, share: bool) -> str:
    """Return the difference of both scores with its interval."""
    parts = [format_score(scores.difference, share, "+")]
    if (found := scores.interval) is not None:
        ends = f"{format_score(found.low, share, '+')} to {format_score(found.high, share, '+')}"
        parts.append(f"{100 * found.level:g} % interval {ends} ({found.method})")
    if scores.p_value is not None:
        parts.append(f"McNemar p = {scores.p_value:.3g}")
    return ", ".join(parts)


def list_scores(record: EvaluationRecord) -> list[str]:
    """Return the scores of an evaluation, one text per line."""
    if record.scores is None:
        return []
    share = record.is_share
    limit = f"; allowed drop {format_score(record.allowed_drop, share)}" if record.allowed_drop is not None else ""
    early = ", the result was already clear" if record.stopped_early else ""
    return [
        f"{record.settings.metric}: {describe_scores(record.scores, is_share=share)}",
        f"difference: {describe_difference(record.scores, share)}{limit}",
        f"samples: {record.evaluated} of {record.identity.samples}{early}; "
        f"{record.scores.differing} answers differ from the reference {record.reference}",
    ]

"""Show the record of an evaluation in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hil.controller.pipeline.records.print_case import COLOURS
from hil.controller.records.decisions.evaluation import EvaluationRecord
from hil.controller.storage.screen.texts import align_rows, format_score, line
from hil.controller.workloads.evaluation.score_texts import describe_difference

if TYPE_CHECKING:
    from rich.console import Console

_ANSWER = 24


def print_evaluation(console: Console, record: EvaluationRecord) -> None:
    """Print the scores, their difference, and the worst samples."""
    from rich.text import Text

    outcome = record.outcome.value if record.outcome else "UNFINISHED"
    colour = "yellow" if outcome == "SKIP" else COLOURS.get(record.outcome, "magenta") if record.outcome else "magenta"
    title = Text(outcome, style=f"bold {colour}")
    title.append(f"  {record.name}", style="bold default")
    where = f"  {record.runtime or 'default runtime'} on {record.board}" if record.board else ""
    title.append(where, style="default")
    console.print(title, soft_wrap=True)
    for text in _list_lines(record):
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _list_lines(record: EvaluationRecord) -> Iterator[str]:
    scores, share = record.scores, record.is_share
    total = record.identity.samples
    early = ": the result is already clear" if record.stopped_early else ""
    yield f"  samples      {record.evaluated} of {total}{early}"
    if scores is not None:
        better = "" if record.is_higher_better else " (lower is better)"
        yield f"  metric       {record.settings.metric}{better}"
        yield f"  board        {format_score(scores.board, share)}"
        yield f"  reference    {format_score(scores.reference, share)}  {record.reference}".rstrip()
        yield f"  difference   {describe_difference(scores, share)}"
        if record.allowed_drop is not None:
            yield f"  allowed drop {format_score(record.allowed_drop, share)}"
        yield f"  answers      {scores.differing} of {record.evaluated} differ from the reference"
    if record.outcome is None or record.outcome.value not in ("PASS", "FAIL"):
        if record.reason:
            yield f"  {record.reason}"
        if record.hint:
            yield f"  hint: {record.hint}"
    if scores is not None and scores.worst:
        rows = [("worst samples", "board", "reference", "answers")]
        for one in scores.worst:
            answers = f"{_shorten(one.board_answer)} / {_shorten(one.reference_answer)}"
            row = (one.name, format_score(one.board, share), format_score(one.reference, share))
            rows.append((*row, "" if one.board_answer is None else answers))
        yield from (f"  {text}".rstrip() for text in align_rows(rows, left=1))
    if record.folder:
        yield f"stored in {record.folder}"


def _shorten(answer: Any) -> str:
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    return line(str(answer), _ANSWER)

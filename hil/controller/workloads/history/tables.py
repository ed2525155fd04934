"""Rows of the history for the terminal and for CSV."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterable, Iterator, Sequence

from hil.controller.pipeline.records.energy_text import ENERGY_COLUMNS, format_unit_energy, list_energy
from hil.controller.records.measurements.history import EntryScore, HistoryEntry, SeriesChange, SeriesKey, SeriesSummary
from hil.controller.storage.history.store import compute_relative_spread, make_series_id
from hil.controller.storage.screen.texts import as_text, format_score, format_seconds, line
from hil.controller.workloads.history.entry_changes import describe_stacks

SERIES_HEADS = ("series", "kind", "model", "case", "board", "runtime", "runs", "median", "outcome")
ENTRY_HEADS = ("time", "commit", "median", "spread", "samples", "outcome", "board", "run")
EVALUATION_HEADS = ("time", "commit", "score", "reference", "samples", "outcome", "board", "run")
CSV_HEADS = (
    *("series", "kind", "model", "case", "function", "board", "runtime", "flow", "flags", "run", "created", "commit"),
    *("branch", "dirty", "outcome", "reason", "max_abs", "sqnr_db", "score", "iterations", "p50_ns", "spread"),
    *("compiler", "runtime_version", "program", "annotations", "instructions", "counter", "grade"),
    *ENERGY_COLUMNS,
)
_COMMIT = 9


def describe_series(one: SeriesSummary) -> tuple[str, ...]:
    """Return the cells of a series for :data:`SERIES_HEADS`."""
    key = one.key
    return (
        *(
            one.id,
            key.kind,
            key.model,
            " ".join(filter(None, (key.case, key.flow))),
            key.board or "-",
            key.runtime or "-",
        ),
        *(str(one.entries), _format_nanoseconds(one.p50_ns), one.outcome),
    )


def describe_entries(
    entries: Sequence[HistoryEntry], *, is_evaluation: bool
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the heads and the rows of a table of entries.

    If an entry has counts, a column shows the instructions. If an entry has a grade, a column shows the grades.
    The same holds for the energy of an inference. If the stack changed, a column shows the changed parts.
    """
    heads: tuple[str, ...] = EVALUATION_HEADS if is_evaluation else ENTRY_HEADS
    rows = [_describe_entry(one) for one in entries]
    optional = {
        "instructions": [_describe_instructions(one) for one in entries],
        "energy": [_describe_energy(one) for one in entries],
        "grade": ["-" if one.grade is None else one.grade.grade for one in entries],
        "stack": _describe_stack_column(entries),
    }
    for head, cells in optional.items():
        if any(cell != "-" for cell in cells):
            place = heads.index("outcome")
            rows = [(*row[:place], cell, *row[place:]) for row, cell in zip(rows, cells, strict=True)]
            heads = (*heads[:place], head, *heads[place:])
    return heads, rows


def _describe_stack_column(entries: Sequence[HistoryEntry]) -> list[str]:
    """Return a cell per entry, or only dashes if no entry has a stack."""
    if all(one.board.parts is None for one in entries):
        return ["-"] * len(entries)
    return [line(text) or "-" for text in describe_stacks(entries)]


def _describe_entry(entry: HistoryEntry) -> tuple[str, ...]:
    """Return the cells of an entry for :data:`ENTRY_HEADS`, or for :data:`EVALUATION_HEADS`."""
    mark = "+" if entry.source.dirty else ""
    return (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.created)),
        f"{entry.source.commit[:_COMMIT]}{mark}" or "-",
        *(_describe_times(entry) if entry.score is None else _describe_score(entry.score)),
        entry.outcome,
        entry.board.name or "-",
        entry.run,
    )


def describe_change(change: SeriesChange) -> str:
    """Return a change in one line."""
    since = change.commit[:_COMMIT] or change.run
    level = (
        f"from {change.before:.4g} to {change.after:.4g}"
        if change.ratio is None
        else f"{change.ratio:.3f} times the level before"
    )
    return f"change: {level}, since {since} (p = {change.p_value:.2g})"


def describe_key(key: SeriesKey) -> str:
    """Return a series in one line."""
    parts = [key.model, key.case, key.function, key.flow, f"on {key.board or '?'}", key.runtime, *key.flags]
    return " ".join(filter(None, parts)) + f" ({key.kind})"


def list_notes(entry: HistoryEntry) -> Iterator[str]:
    """Yield an entry's annotations, and the reason for a failure."""
    for note in entry.annotations:
        yield f"note: {line(note.text)}"
    if entry.outcome not in ("PASS", "SKIP") and entry.reason:
        yield line(entry.reason)


def write_csv(entries: Iterable[HistoryEntry]) -> str:
    """Return entries as CSV, without samples. Texts that look like a formula are escaped."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(CSV_HEADS)
    for entry in entries:
        key, error = entry.key, entry.error
        cells = (
            *(make_series_id(key), key.kind, key.model, key.case, key.function, key.board, key.runtime, key.flow),
            *(" ".join(key.flags), entry.run, entry.created, entry.source.commit, entry.source.branch),
            *(entry.source.dirty, entry.outcome, entry.reason, error and error.max_abs, error and error.sqnr_db),
            *(entry.score and entry.score.board,),
            *(entry.iterations, entry.p50_ns, compute_relative_spread(entry.samples_ns), entry.tools.compiler),
            *(entry.tools.runtime, entry.program, "; ".join(note.text for note in entry.annotations)),
            *((counted.median, counted.counter) if (counted := entry.instructions) else (None, None)),
            entry.grade and entry.grade.grade,
            *list_energy(entry.energy),
        )
        rows.writerow([as_text(cell) if isinstance(cell, str) else cell for cell in cells])
    return text.getvalue()


def _describe_times(entry: HistoryEntry) -> tuple[str, str, str]:
    spread = compute_relative_spread(entry.samples_ns)
    cell = "-" if spread is None else f"{100 * spread:.1f} %"
    return _format_nanoseconds(entry.p50_ns), cell, str(entry.iterations)


def _describe_instructions(entry: HistoryEntry) -> str:
    counted = entry.instructions
    return "-" if counted is None or counted.median is None else f"{counted.median:,.0f}"


def _describe_energy(entry: HistoryEntry) -> str:
    found = entry.energy
    return "-" if found is None or found.per_inference is None else format_unit_energy(found.per_inference)


def _describe_score(score: EntryScore) -> tuple[str, str, str]:
    board, reference = (format_score(value, score.is_share) for value in (score.board, score.reference))
    return board, reference, str(score.samples)


def _format_nanoseconds(value: float | None) -> str:
    return format_seconds(None if value is None else value / 1e9)

"""Find the changes of a series, as `hil gate` finds them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hil.controller.analysis.detection.changes import Change, find_changes
from hil.controller.records.base import parse_number
from hil.controller.records.measurements.conditions import is_comparable
from hil.controller.records.measurements.history import HistoryEntry, SeriesChange
from hil.core.results import BOARD_OUTCOMES

# Description of a missing stack.
UNKNOWN_STACK = "unknown"


@dataclass(frozen=True)
class EntryChanges:
    """Changes among the entries of a series.

    Attributes:
        values: value of each entry that is comparable; see :func:`get_value`.
        judged: indices of these entries.
        changes: index of the first entry with a new level, and the change.
    """

    values: Sequence[float]
    judged: Sequence[int]
    changes: Sequence[tuple[int, Change]]


def find_entry_changes(entries: Sequence[HistoryEntry]) -> EntryChanges:
    """Find the changes in entries in time order.

    Entries with board errors, times with grade F, and times of other clocks than the newest are not compared. If the
    newest entry has a stack, entries without one are not compared.
    """
    needs_stack = bool(entries) and entries[-1].board.parts is not None
    clock = next((one.clock for one in reversed(entries) if one.p50_ns is not None), None)
    judged = [
        index
        for index, one in enumerate(entries)
        if one.clock == clock and _is_comparable(one) and (one.board.parts is not None or not needs_stack)
    ]
    values = [get_value(entries[index]) or 0.0 for index in judged]
    return EntryChanges(values, judged, [(judged[one.index], one) for one in find_changes(values)])


def describe_stacks(entries: Sequence[HistoryEntry]) -> list[str]:
    """Return how the stack of each entry differs from the last known stack before it.

    The text is "" if no part has changed, and "unknown" for an entry without a stack.
    """
    return describe_changed_stacks([one.board.parts for one in entries])


def describe_changed_stacks(stacks: Sequence[Mapping[str, str] | None]) -> list[str]:
    """Return how each stack differs from the last known stack before it, as :func:`describe_stacks`."""
    found, last = [], None
    for parts in stacks:
        if parts is None:
            found.append(UNKNOWN_STACK)
            continue
        found.append(", ".join(list_changed_parts(last, parts)) if last is not None else "")
        last = parts
    return found


def list_changed_parts(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return the parts with different versions, as ``driver 1.0 -> 1.1``."""
    names = dict.fromkeys((*old, *new))
    changed = [(name, old.get(name, ""), new.get(name, "")) for name in names if old.get(name, "") != new.get(name, "")]
    return [f"{name} {before or 'unknown'} -> {after or 'unknown'}" for name, before, after in changed]


def get_value(entry: HistoryEntry) -> float | None:
    """Return the score of an evaluation, shares in percent, or the median time of another entry in nanoseconds."""
    return entry.p50_ns if entry.score is None else convert_score(entry.score.board, is_share=entry.score.is_share)


def convert_score(score: float | str | None, *, is_share: bool) -> float | None:
    """Return a stored score as a number, shares in percent."""
    value = parse_number(score)
    return None if value is None else 100 * value if is_share else value


def describe_changes(entries: Sequence[HistoryEntry]) -> list[SeriesChange]:
    """Return the records of all changes, oldest first."""
    return [
        SeriesChange(
            run=entries[index].run,
            commit=entries[index].source.commit,
            created=entries[index].created,
            ratio=one.ratio,
            before=one.before,
            after=one.after,
            p_value=one.p_value,
        )
        for index, one in find_entry_changes(entries).changes
    ]


def _is_comparable(entry: HistoryEntry) -> bool:
    value = get_value(entry)
    # Scores may have any sign. A time of 0 was not measured.
    is_value = value is not None and math.isfinite(value) and (value > 0 or entry.score is not None)
    return is_value and entry.outcome not in BOARD_OUTCOMES and is_comparable(entry.grade)

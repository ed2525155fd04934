"""Rewriting a file of expected failures from a run: ``hil suite expect``.

What ended as expected stays as it is, to the letter. A case that did not is taken out of the entries that speak of it
where it ran; where it failed, an entry is made for it, or it joins one of the same outcome and like reason. Left alone
are cases that the run did not include, entries for other flows and boards, what a lost board or a flaky answer says
nothing about, and what an entry foresaw whose day is over: to renew that is for a person to decide.
"""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from hil.controller.storage.runs import storing
from hil.controller.workloads.suites.expected import Expectations, message_of
from hil.controller.workloads.suites.expected_blocks import Block, edited, join, new_block, split
from hil.controller.workloads.suites.expected_file import (
    TABLES,
    Expectation,
    is_wild,
    matches,
    parse,
    read_text,
    table_of,
)
from hil.controller.workloads.suites.record import CaseRecord
from hil.core.results import Outcome

# Mismatches that came and went, or that only one board has, are no property of the case.
_FICKLE = ("flaky", "one bad board")
_LONGEST = 160  # characters of a reason that is made from a message
# What differs between messages of one kind: a node's or tensor's name, lists, numbers.
_NAME = re.compile(r"""\b(at|name|named|node|input|output|tensor) ('[^']*'|"[^"]*"|`[^`]*`)|\b(output) [^\s…]+(?=: )""")
_NUMBERS = re.compile(r"\[[^\[\]]*\]|(?<!\w)(?<!every value is )[-+]?(?:\d[\w.+-]*|(?:nan|inf)\b)")
# What of a mismatch was measured says nothing once its numbers are out.
_COUNT = re.compile(r"(?:… of )?… values?( differ)?s?\b")
_MEASURED = re.compile(
    r"\boutput …: | \(rtol …, atol …\)| \(and … more outputs?\)"
    r"|, (?:worst|first) at …: .*?, the reference has .*?(?=; |$)"
)


def update(
    path: Path, records: Iterable[CaseRecord], *, ids: Collection[str], write: bool, today: date | None = None
) -> str:
    """Rewrite a file so that its expectations are what a run came to.

    Args:
        path: the file; it need not be there.
        records: of the run, judged or not. Where a case was run several times in one place, the last counts.
        ids: of all cases of the whole suite: a pattern is taken out only where none of them needs it, and else the case
            is named in ``except``.
        write: whether to write it.
        today: the day by which entries expire.

    Returns:
        What changes, as a unified diff; "" where nothing does. The same run changes nothing a second time.

    Raises:
        UsageError: it is no file of expected failures, or its entries are not written as ``[[compile]]``, ``[[run]]``.
        StorageError: it cannot be written.
    """
    before = read_text(path)
    after = updated(before, path, records, ids=ids, today=today or date.today())
    if write and after != before:
        with storing(path, ""):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(after, encoding="utf-8")
    old, new = (text.splitlines(keepends=True) for text in (before, after))
    return "".join(difflib.unified_diff(old, new, str(path) if before else "/dev/null", str(path)))


def updated(text: str, path: Path, records: Iterable[CaseRecord], *, ids: Collection[str], today: date) -> str:
    """The new text of a file; see :func:`update`."""
    last = {record.id: record for record in records}
    told = [record for _, record in sorted(last.items()) if _tells(record)]
    old = Expectations(path, parse(text, path), today)
    known = _without_surprises(old, told, frozenset({*ids, *last}))
    entries, new = _with(known, [record for record in told if _unforeseen(known, record)])
    if entries == old.entries and not new:
        return text
    return _rewritten(text, path, old.entries, entries, new)


def _tells(record: CaseRecord) -> bool:
    """Whether a record says something about its case."""
    return (record.ended == Outcome.PASS.value or bool(table_of(record))) and record.confirmed not in _FICKLE


def _unforeseen(known: Expectations, record: CaseRecord) -> bool:
    """Whether a failure needs an entry."""
    return (
        record.ended != Outcome.PASS.value
        and known.find(record) is None
        and not any(old.speaks_of(record) and old.foresees(record) for old in known.expired())
    )


def _without_surprises(known: Expectations, told: Sequence[CaseRecord], ids: frozenset[str]) -> Expectations:
    """Take each case out of every entry that foresees another end. An entry that is left without cases stays, empty."""
    while True:
        gone: defaultdict[Expectation, set[str]] = defaultdict(set)
        for record in told:
            found = known.find(record)
            if found and not found.foresees(record):
                gone[found].add(record.id)
            if record.ended == Outcome.PASS.value:
                for old in known.expired():
                    if old.speaks_of(record):
                        gone[old].add(record.id)
        if not gone:
            return known
        # What stood behind an entry may count now, so look again.
        known = replace(
            known, entries=tuple(_without(one, gone[one], ids) if one in gone else one for one in known.entries)
        )


def _without(entry: Expectation, gone: Collection[str], ids: frozenset[str]) -> Expectation:
    """An entry that speaks no more of some cases; a pattern that some other case needs stays, with exceptions."""

    def needed(pattern: str) -> bool:
        covered = {name for name in ids if matches((pattern,), name) and not matches(entry.without, name)}
        return not covered or not covered <= set(gone)

    kept = tuple(one for one in entry.cases if (needed(one) if is_wild(one) else one not in gone))
    still = (*entry.without, *sorted(name for name in gone if matches(kept, name)))
    return replace(entry, cases=kept, without=tuple(one for one in still if is_wild(one) or matches(kept, one)))


def _with(known: Expectations, failed: Sequence[CaseRecord]) -> tuple[tuple[Expectation, ...], list[Expectation]]:
    """The entries with what failed in them where one fits, and new ones for the others."""
    groups: defaultdict[tuple[str, str, str, str, str], list[CaseRecord]] = defaultdict(list)
    for record in failed:
        groups[table_of(record), record.ended, record.flow, record.hw_type, _likeness(record)].append(record)
    entries, new = list(known.entries), []
    for (table, outcome, flow, hw_type, likeness), records in groups.items():
        names = tuple(record.id for record in records)
        for place, entry in enumerate(entries):
            if _takes(entry, records, likeness):
                left = tuple(one for one in entry.without if one not in names)
                more = [name for name in names if not matches(entry.cases, name)]
                entries[place] = replace(entry, cases=_inserted(entry.cases, more), without=left)
                break
        else:
            board = (hw_type,) if hw_type else ()
            new.append(Expectation(table, 0, names, (outcome,), _reason(records), flow=(flow,), board=board))
    return tuple(entries), new


def _takes(entry: Expectation, records: Sequence[CaseRecord], likeness: str) -> bool:
    """Whether an entry is one for some failures, going by what it says of others."""
    return (
        bool(entry.cases)
        and entry.until is None
        and len(entry.outcomes) == 1
        and alike(entry.reason) == likeness
        and all(entry.foresees(record) and entry.in_scope(record) for record in records)
        and not any(matches(tuple(filter(is_wild, entry.without)), record.id) for record in records)
    )


def _inserted(cases: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    merged = list(cases)
    for name in names:
        merged.insert(bisect_left(merged, name), name)
    return tuple(merged)


def alike(message: str) -> str:
    """What messages of one kind have in common, in a line, cut.

    Where one speaks of its own case stands an ellipsis; what was measured of a mismatch is left out.
    """
    first = message.strip().splitlines()[0].strip() if message.strip() else ""
    text, before = first, ""
    while text != before:  # lists may hold lists
        before, text = text, _NUMBERS.sub("…", _NAME.sub(lambda found: f"{found[1] or found[3]} …", text))
        text = _MEASURED.sub("", _COUNT.sub(r"values\1", text)).strip()
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 2].rstrip(' …')} …"


def _likeness(record: CaseRecord) -> str:
    message = message_of(record)
    for name in filter(None, (record.id, record.model)):
        message = re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", "…", message)
    return alike(message) or record.ended


def _reason(records: Sequence[CaseRecord]) -> str:
    """The message of failures that are alike: as it is where they all have the same, and it is short.

    A mismatch tells of numbers, and these may be others in the next run: it is always told by its kind.
    """
    said = {message_of(record).strip().partition("\n")[0] for record in records}
    likeness = _likeness(records[0])
    first = said.pop()
    plain = not said and len(first) <= _LONGEST and alike(first) == likeness
    return first if plain and records[0].ended != Outcome.FAIL.value else likeness


def _rewritten(
    text: str, path: Path, old: Sequence[Expectation], entries: Sequence[Expectation], new: Sequence[Expectation]
) -> str:
    changed = {(one.table, one.number): one for before, one in zip(old, entries, strict=True) if one != before}
    head, blocks = split(text, path)
    counts: Counter[str] = Counter()
    after: list[Block] = []
    for block in blocks:
        counts[block.table] += 1
        entry = changed.get((block.table, counts[block.table]))
        if entry is None:
            after.append(block)
        elif entry.cases:
            after.append(edited(block, entry))
        elif block.tail.strip():  # a comment that is not the entry's own
            after.append(Block("", "", block.tail))
    for entry in new:
        tables = [block.table for block in after]
        beside = [place for place, table in enumerate(tables) if table == entry.table]
        default = 0 if entry.table == next(iter(TABLES)) else len(after)
        after.insert(beside[-1] + 1 if beside else default, new_block(entry))
    return join(head, after)

"""Rewrite a file of expected failures from a run (``hil suite expect``).

The text of correct entries never changes. hil removes a case with an unexpected result from the entries that apply to
the case. If the case failed, hil adds the case to an entry with the same outcome and a similar reason, or to a new
entry. Cases outside the run and entries for other flows and boards never change. The same applies to cases with a lost
board or a flaky result, and to failures that an expired entry expected. A person decides whether to renew an expired
entry.

hil edits the file as text, entry by entry, because a TOML library assigns the comment above an entry to the previous
entry.
"""

from __future__ import annotations

import difflib
import re
from bisect import insort_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import Array

from hil.controller.records.suite import CaseRecord
from hil.controller.storage.runs import convert_write_errors
from hil.controller.workloads.suites.expected import (
    TABLES,
    Expectation,
    Expectations,
    choose_table,
    is_wild,
    matches,
    parse,
    read_text,
    strip_judgement,
)
from hil.core.results import Outcome
from hil.errors import UsageError

_PASS = Outcome.PASS.value
# Results of confirmation runs that show that the case did not cause the mismatch.
_UNSTABLE = ("flaky", "one bad board")
_MAX_MESSAGE_LENGTH = 160  # maximum length for reasons made from messages, in characters
# Parts that differ between similar messages: node and tensor names, lists, numbers.
_NAME = re.compile(r"""\b(at|name|named|node|input|output|tensor) ('[^']*'|"[^"]*"|`[^`]*`)|\b(output) [^\s…]+(?=: )""")
_NUMBERS = re.compile(r"\[[^\[\]]*\]|(?<!\w)(?<!every value is )[-+]?(?:\d[\w.+-]*|(?:nan|inf)\b)")
# Measurements of a mismatch, which are useless without the numbers.
_COUNT = re.compile(r"(?:… of )?… values?( differ)?s?\b")
_MEASURED = re.compile(
    r"\boutput …: | \(rtol …, atol …\)| \(and … more outputs?\)"
    r"|, (?:worst|first) at …: .*?, the reference has .*?(?=; |$)"
)

_HEADER = re.compile(r"\s*\[\[\s*(\w+)\s*\]\]")
_WIDEST = 100  # maximum width for single-line lists


def update(
    path: Path, records: Iterable[CaseRecord], *, ids: Collection[str], write: bool, today: date | None = None
) -> str:
    """Rewrite a file so that the expectations agree with a run.

    Args:
        path: the file, which may be missing.
        records: from the run, judged or not. If a case has multiple records, the last counts.
        ids: IDs of all suite cases. If a pattern also covers another case that needs the entry, hil keeps the pattern,
            and the removed case becomes an ``except``.

    Returns:
        The changes as a unified diff; "" without changes. Repeating the call with the same run has no effect.

    Raises:
        UsageError: the file is invalid, or its entries are not written as ``[[compile]]``, ``[[run]]``.
        StorageError: the file cannot be written.
    """
    before = read_text(path)
    after = update_text(before, path, records, ids=ids, today=today or date.today())
    if write and after != before:
        with convert_write_errors(path, ""):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(after, encoding="utf-8")
    old, new = (text.splitlines(keepends=True) for text in (before, after))
    return "".join(difflib.unified_diff(old, new, str(path) if before else "/dev/null", str(path)))


def update_text(text: str, path: Path, records: Iterable[CaseRecord], *, ids: Collection[str], today: date) -> str:
    """Return the new text of a file; see :func:`update`."""
    last = {record.id: record for record in records}
    judged = [
        record
        for _, record in sorted(last.items())
        if (record.ended == _PASS or choose_table(record)) and record.confirmed not in _UNSTABLE
    ]
    old = Expectations(path, parse(text, path), today)
    known = _remove_unexpected(old, judged, frozenset({*ids, *last}))
    entries, new = _add_failures(known, [record for record in judged if _is_unexpected(known, record)])
    if entries == old.entries and not new:
        return text
    return _rewrite_text(text, path, old.entries, entries, new)


def _is_unexpected(known: Expectations, record: CaseRecord) -> bool:
    """Return whether a failure needs an entry."""
    covered = [known.find(record), *(old for old in known.expired() if old.applies_to(record) and old.expects(record))]
    return record.ended != _PASS and not any(covered)


def _remove_unexpected(known: Expectations, judged: Sequence[CaseRecord], ids: frozenset[str]) -> Expectations:
    """Remove a case from each entry that expects a different result than the case had.

    An entry may end up without cases.
    """
    while True:
        gone: defaultdict[Expectation, set[str]] = defaultdict(set)
        for record in judged:
            found = known.find(record)
            if found and not found.expects(record):
                gone[found].add(record.id)
            for old in known.expired():
                if record.ended == _PASS and old.applies_to(record):
                    gone[old].add(record.id)
        if not gone:
            return known
        # Repeat, because a different entry may apply now.
        known = replace(
            known, entries=tuple(_remove_cases(one, gone[one], ids) if one in gone else one for one in known.entries)
        )


def _remove_cases(entry: Expectation, gone: Collection[str], ids: frozenset[str]) -> Expectation:
    """Remove cases from an entry. Keep a pattern that other cases need, and add exceptions."""

    def is_needed(pattern: str) -> bool:
        covered = {name for name in ids if matches((pattern,), name) and not matches(entry.without, name)}
        return not covered or not covered <= set(gone)

    kept = tuple(one for one in entry.cases if (is_needed(one) if is_wild(one) else one not in gone))
    still = (*entry.without, *sorted(name for name in gone if matches(kept, name)))
    return replace(entry, cases=kept, without=tuple(one for one in still if is_wild(one) or matches(kept, one)))


def _add_failures(
    known: Expectations, failed: Sequence[CaseRecord]
) -> tuple[tuple[Expectation, ...], list[Expectation]]:
    """Return the entries with failed cases added to matching entries, and new entries for the other cases."""
    groups: defaultdict[tuple[str, str, str, str, str], list[CaseRecord]] = defaultdict(list)
    for record in failed:
        groups[choose_table(record), record.ended, record.flow, record.hw_type, _generalize_message(record)].append(
            record
        )
    entries, new = list(known.entries), []
    for (table, outcome, flow, hw_type, likeness), records in groups.items():
        names = tuple(record.id for record in records)
        for index, entry in enumerate(entries):
            if _can_add_failures(entry, records, likeness):
                left = tuple(one for one in entry.without if one not in names)
                cases = list(entry.cases)
                for name in names:
                    if not matches(entry.cases, name):
                        insort_left(cases, name)
                entries[index] = replace(entry, cases=tuple(cases), without=left)
                break
        else:
            board = (hw_type,) if hw_type else ()
            new.append(Expectation(table, 0, names, (outcome,), _choose_reason(records), flow=(flow,), board=board))
    return tuple(entries), new


def _can_add_failures(entry: Expectation, records: Sequence[CaseRecord], likeness: str) -> bool:
    """Return whether failures can be added to an entry: same outcome and similar reason."""
    any_case = replace(entry, cases=("*",), without=())
    return (
        bool(entry.cases)
        and entry.until is None
        and len(entry.outcomes) == 1
        and generalize_text(entry.reason) == likeness
        and all(entry.expects(record) and any_case.applies_to(record) for record in records)
        and not any(matches(tuple(filter(is_wild, entry.without)), record.id) for record in records)
    )


def generalize_text(message: str) -> str:
    """Return the common part of similar messages as a single truncated line.

    An ellipsis replaces details of the case. Measurements of a mismatch are removed.
    """
    first = message.strip().splitlines()[0].strip() if message.strip() else ""
    text, before = first, ""
    while text != before:  # lists may be nested
        before, text = text, _NUMBERS.sub("…", _NAME.sub(lambda found: f"{found[1] or found[3]} …", text))
        text = _MEASURED.sub("", _COUNT.sub(r"values\1", text)).strip()
    return text if len(text) <= _MAX_MESSAGE_LENGTH else f"{text[: _MAX_MESSAGE_LENGTH - 2].rstrip(' …')} …"


def _generalize_message(record: CaseRecord) -> str:
    message = strip_judgement(record)
    for name in filter(None, (record.id, record.model)):
        message = re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", "…", message)
    return generalize_text(message) or record.ended


def _choose_reason(records: Sequence[CaseRecord]) -> str:
    """Return a reason for similar failures: their message if it is short and the same for all, or the common part.

    For mismatches, always use the common part, because the numbers may differ in the next run.
    """
    messages = {strip_judgement(record).strip().partition("\n")[0] for record in records}
    likeness = _generalize_message(records[0])
    first = messages.pop()
    plain = not messages and len(first) <= _MAX_MESSAGE_LENGTH and generalize_text(first) == likeness
    return first if plain and records[0].ended != Outcome.FAIL.value else likeness


def _rewrite_text(
    text: str, path: Path, old: Sequence[Expectation], entries: Sequence[Expectation], new: Sequence[Expectation]
) -> str:
    changed = {(one.table, one.number): one for before, one in zip(old, entries, strict=True) if one != before}
    head, blocks = _split_blocks(text, path)
    counts: Counter[str] = Counter()
    after: list[_Block] = []
    for block in blocks:
        counts[block.table] += 1
        entry = changed.get((block.table, counts[block.table]))
        if entry is None:
            after.append(block)
        elif entry.cases:
            document = tomlkit.parse(block.body)
            _set_cases(document[block.table][0], entry)
            after.append(replace(block, body=tomlkit.dumps(document)))
        elif block.tail.strip():  # a comment that does not belong to the entry
            after.append(_Block("", "", block.tail))
    for entry in new:
        tables = [block.table for block in after]
        same = [index for index, table in enumerate(tables) if table == entry.table]
        default = 0 if entry.table == next(iter(TABLES)) else len(after)
        after.insert(same[-1] + 1 if same else default, _create_block(entry))
    return _join_blocks(head, after)


@dataclass(frozen=True)
class _Block:
    """Text of an entry."""

    table: str  # ``compile`` or ``run``
    body: str  # the comment above it, the header and the keys
    tail: str = ""  # blank lines and comments up to the next block
    new: bool = False  # not in the file yet; separated by empty lines


def _split_blocks(text: str, path: Path) -> tuple[str, list[_Block]]:
    """Split a text into the part before the first entry, and the entries in order. Joining restores the text."""
    lines = text.splitlines(keepends=True)
    headers = [(number, found[1]) for number, line in enumerate(lines) if (found := _HEADER.match(line))]
    starts = []
    for start, _ in headers:
        while start and lines[start - 1].lstrip().startswith("#"):
            start -= 1
        starts.append(start)
    blocks = []
    for start, stop, (_, table) in zip(starts, [*starts[1:], len(lines)][: len(starts)], headers, strict=True):
        end = stop
        while not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#"):
            end -= 1
        blocks.append(_Block(table, "".join(lines[start:end]), "".join(lines[end:stop])))
    # Check the result, because multi-line strings may look like headers, and tables may be inline.
    try:
        apart = [entry for block in blocks for entry in parse(block.body, path)]
    except UsageError:
        apart = []
    numbered = [replace(entry, number=0) for entry in parse(text, path)]
    if [replace(entry, number=0) for entry in sorted(apart, key=lambda entry: entry.table)] != numbered:
        raise UsageError(
            f"cannot update {path}: unsupported layout of the entries",
            hint="begin each entry with a separate [[compile]] or [[run]] line, and avoid such lines in strings",
        )
    return "".join(lines[: starts[0]] if starts else lines), blocks


def _join_blocks(head: str, blocks: Sequence[_Block]) -> str:
    text, last_new = head, False
    for block in blocks:
        if text and not text.endswith("\n"):
            text += "\n"
        if text and not text.endswith("\n\n") and (block.new or last_new):
            text += "\n"
        text, last_new = text + block.body + block.tail, block.new
    return f"{text.rstrip()}\n" if text.strip() else ""


def _create_block(entry: Expectation) -> _Block:
    row = tomlkit.table()
    _set_cases(row, entry)
    for key, value in (("outcome", entry.outcomes), ("reason", (entry.reason,)), ("flow", entry.flow)):
        row.add(key, value[0] if len(value) == 1 else list(value))
    if entry.board:
        row.add("board", entry.board[0])
    tables = tomlkit.aot()
    tables.append(row)
    document = tomlkit.document()
    document.add(entry.table, tables)
    return _Block(entry.table, tomlkit.dumps(document), new=True)


def _set_cases(row: Any, entry: Expectation) -> None:
    """Set a table's cases and exceptions from an entry. Other keys are unchanged."""
    for key, wanted in (("cases", entry.cases), ("except", entry.without)):
        if not wanted:
            row.pop(key, None)
            continue
        there = row.get(key)
        if isinstance(there, Array):
            # Edit the list item by item, so that the comments of other items are kept.
            for one in [one for one in there if one not in wanted]:
                there.remove(one)
            for index, one in enumerate(wanted):
                if index == len(there) or there[index] != one:
                    there.insert(index, one)
        elif wanted != ((there,) if there else ()):
            there = row[key] = tomlkit.item(wanted[0] if len(wanted) == 1 else list(wanted))
        if isinstance(there, Array) and "\n" not in there.as_string() and len(there.as_string()) + len(key) > _WIDEST:
            there.multiline(True)

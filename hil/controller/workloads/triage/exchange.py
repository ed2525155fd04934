"""Convert triage entries to and from the format of expected failures, ``expected.toml``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from datetime import date
from typing import Any

import tomlkit

from hil.controller.records.decisions.triage import HIDDEN, MAX_TRIAGE_CHARS, TriageEntry
from hil.controller.workloads.suites.expected import TABLES, Expectation, is_wild, parse
from hil.controller.workloads.triage.entries import (
    covers_name,
    find_same,
    is_expired,
    make_entry,
    make_entry_key,
    measure_precision,
    put_entry,
)
from hil.core.results import Outcome

_RANKS = 3  # length of :func:`_rank_entry`
_PASS, _TIMEOUT = Outcome.PASS.value, Outcome.TIMEOUT.value


def import_expectations(
    entries: Sequence[TriageEntry], expectations: Iterable[Expectation], *, suite: str, owner: str, now: float
) -> tuple[list[TriageEntry], int]:
    """Add expected failures to triage entries. Owners of existing entries are kept.

    As in a list of expected failures, ``[[compile]]`` has priority over ``[[run]]`` for the same cases.

    Args:
        suite: suite of the expected failures; "" for all suites.
        owner: owner of new entries.
        now: time of the change.

    Returns:
        The entries, and the number of imported entries.

    Raises:
        UsageError: a text is too long.
    """
    found, tables = list(entries), dict[tuple[str, ...], str]()
    for expectation in expectations:
        for case, flow, runtime, board in itertools.product(
            expectation.cases, *(one or ("",) for one in (expectation.flow, expectation.runtime, expectation.board))
        ):
            outcomes = [one for one in expectation.outcomes if one != _PASS]
            entry = make_entry(
                case=case,
                suite=suite,
                flow=flow,
                runtime=runtime,
                board=board,
                excluded=list(expectation.without),
                outcomes=outcomes,
                owner=owner,
                stage="compile" if expectation.table == "compile" else "run",
                state="wontfix" if expectation.until else "known",
                issue=expectation.issue[:MAX_TRIAGE_CHARS],
                note=expectation.reason[:MAX_TRIAGE_CHARS],
                until=str(expectation.until) if expectation.until else None,
                changed=now,
            )
            if tables.setdefault(make_entry_key(entry), expectation.table) != expectation.table:
                continue
            same = find_same(found, entry)
            found = put_entry(found, entry.replace(owner=(same.owner if same else "") or entry.owner))
    return found, len(tables)


def export_expectations(entries: Iterable[TriageEntry], *, suite: str, today: date) -> tuple[str, list[str]]:
    """Return known failures as the text of an ``expected.toml``, and a reason for every entry that is left out.

    Later entries have priority in the file, so the entries with the fewest cases are last.

    Args:
        suite: export only entries for this suite, and for all suites; "" exports all entries.
    """
    rows: dict[tuple[Any, ...], list[str]] = {}
    left_out = []
    for entry in sorted(entries, key=measure_precision):
        if suite and not covers_name(entry.suite, [suite]):
            continue
        if entry.state not in HIDDEN or is_expired(entry, today):
            left_out.append(f"{entry.case}: {'expired' if entry.state in HIDDEN else entry.state}")
            continue
        tables = {table: [one for one in entry.outcomes if _belongs(one, table, entry)] for table in TABLES}
        if not any(tables.values()):
            what = ", ".join(entry.outcomes) or "no outcome"
            left_out.append(f"{entry.case}: {what}, but expected failures require an outcome of a failure")
        for table, outcomes in tables.items():
            if outcomes:
                scope = (entry.flow, entry.runtime, entry.board)
                reason = entry.note or f"triage: {entry.state}"
                key = (table, tuple(outcomes), reason, entry.issue, *scope, entry.until, tuple(entry.excluded))
                rows.setdefault((*_rank_entry(entry), *key), []).append(entry.case)
    document = tomlkit.document()
    for table in TABLES:
        tables_of = tomlkit.aot()
        for key in sorted(rows, key=lambda key: key[:_RANKS]):
            if key[_RANKS] == table:
                tables_of.append(_make_table(key[_RANKS:], rows[key]))
        if len(tables_of):
            document.add(table, tables_of)
    return tomlkit.dumps(document), left_out


def list_patterns(text: str) -> list[str]:
    """Return the patterns of cases in the text of an ``expected.toml``. Passing cases that they match are XPASS."""
    found = (case for entry in parse(text, None) for case in entry.cases if is_wild(case))
    return list(dict.fromkeys(found))


def _rank_entry(entry: TriageEntry) -> tuple[int, int, int]:
    """Return the precision of an entry, the same for all exact entries that may share a table."""
    exact, given, length, _ = measure_precision(entry)
    return exact, given, length - len(entry.case) if exact == given else length


def _belongs(outcome: str, table: str, entry: TriageEntry) -> bool:
    if outcome == _TIMEOUT and entry.stage:
        return table == entry.stage
    return outcome in TABLES[table]


def _make_table(key: tuple[Any, ...], cases: list[str]) -> Any:
    _, outcomes, reason, issue, flow, runtime, board, until, excluded = key
    row = tomlkit.table()
    row.add("cases", _shorten_list(sorted(set(cases))))
    if excluded:
        row.add("except", list(excluded))
    row.add("outcome", _shorten_list(list(outcomes)))
    row.add("reason", reason)
    for name, value in (("issue", issue), ("flow", flow), ("runtime", runtime), ("board", board)):
        if value:
            row.add(name, value)
    if until:
        row.add("until", date.fromisoformat(until))
    return row


def _shorten_list(values: list[str]) -> Any:
    return values[0] if len(values) == 1 else values

"""Read the cases that fail or are slower since a baseline, and group them by cause."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from hil.controller.web.history.baseline import Baseline, find_baseline_of, split_boards
from hil.controller.web.history.causes import BROKE, Cause, ChangedCase, group_changes
from hil.controller.web.history.nights import night_of
from hil.controller.web.session.wrong_layers import BisectedLayer, find_wrong_layers
from hil.controller.web.site import WebSite
from hil.controller.web.text.addresses import link_of

# Maximum changes to read, newest first.
MAX_CHANGES = 2000
# Maximum causes on a page, and maximum cases to name for each.
MAX_CAUSES, NAMED_CASES = 20, 3
# Tools of a suite run that cannot cause a change on a board.
_NO_TOOLS = frozenset({"host", "python", "numpy"})
_WORDS = ("name", "board", "flow", "runtime", "model", "op", "outcome", "ended", "message")
_QUERY = (
    "select changes.what, changes.created, changes.before, changes.after, changes.session, now.id, now.root, now.kind,"
    " now.suite, now.boards, now.title, now.commit_id, was.commit_id as earlier_commit,"
    " now.versions, was.versions as earlier, now.stack, was.stack as earlier_stack,"
    + ", ".join(f" (select word from words where words.key = cases.{name}) as {name}" for name in _WORDS)
    + " from changes join sessions now on now.key = changes.session"
    " left join sessions was on was.key = changes.earlier"
    " join cases on cases.session = changes.session and cases.name = changes.name"
    " where changes.created >= ? and not over order by changes.created desc, changes.session, changes.name limit ?"
)


@dataclass(frozen=True)
class ChangedRow:
    """Row of a changed case on a page."""

    change: ChangedCase
    created: float
    before: float | None  # median time in ns, of a slower case
    after: float | None
    kind: str  # kind of the session
    link: str  # query of the first session with the change
    title: str  # of that session
    commit: str
    earlier_commit: str
    message: str

    @property
    def history(self) -> str:
        """Query of the case's history."""
        one = self.change
        names = {"case": one.case, "kind": self.kind, "suite": one.suite, "flow": one.flow}
        names |= {"runtime": one.runtime, "board": one.board, "model": one.model}
        return urlencode({name: value for name, value in names.items() if value})

    @property
    def case_link(self) -> str:
        """Query of the case's page in that session."""
        return f"{self.link}&{urlencode({'case': self.change.case})}"


@dataclass(frozen=True)
class NewChanges:
    """Changed cases since a baseline, and their causes."""

    baseline: Baseline
    rows: Sequence[ChangedRow]  # `ChangedCase.number` is the index
    causes: Sequence[Cause]
    is_cut: bool = False  # True if there are more than MAX_CHANGES
    unjudged: int = 0  # histories that are not analysed yet

    def list_rows(self, cause: Cause) -> list[ChangedRow]:
        """Return the rows of a cause."""
        return [self.rows[one.number] for one in cause.members]

    def make_query(self, cause: Cause) -> str:
        """Return the query of a cause's page."""
        return urlencode({"since": self.baseline.text, "key": cause.key})

    def find_cause(self, key: str) -> Cause | None:
        """Return the cause with a key, or None."""
        return next((one for one in self.causes if one.key == key), None)


def read_changes(site: WebSite, since: str) -> NewChanges:
    """Return the changed cases since a baseline, from the cache if the index is unchanged. Raises UsageError.

    Do not call this function in a snapshot.
    """
    return site.memo.get(
        ("changes", since), lambda database: read_new_changes(database, find_baseline_of(database, since))
    )


def read_new_changes(database: sqlite3.Connection, baseline: Baseline, most: int = MAX_CHANGES) -> NewChanges:
    """Read the current failures and slower cases since a baseline.

    Args:
        most: maximum changes, newest first.
    """
    found = database.execute(_QUERY, (baseline.created, most + 1)).fetchall()
    rows = [row for row in _keep_newest(found[:most]) if baseline.is_new(row["created"], _list_targets(row))]
    layers = find_wrong_layers(database, {row["model"] for row in rows if row["what"] == BROKE})
    timed = _count_timed(database, {row["session"] for row in rows})
    made = [_make_row(row, number, layers, timed) for number, row in enumerate(rows)]
    unjudged = int(database.execute("select count(*) from unjudged").fetchone()[0])
    return NewChanges(baseline, made, group_changes(one.change for one in made), len(found) > most, unjudged)


def _keep_newest(rows: Sequence[sqlite3.Row]) -> list[sqlite3.Row]:
    """Keep the newest change per history and kind of change."""
    names = ("name", "board", "flow", "runtime", "model", "suite", "kind", "what")
    newest: dict[tuple[Any, ...], sqlite3.Row] = {}
    for row in rows:
        newest.setdefault(tuple(row[name] for name in names), row)
    return list(newest.values())


def _list_targets(row: sqlite3.Row) -> list[tuple[str, str, str]]:
    """Return the targets of a change: all boards of the session if the case never reached a board."""
    boards = [row["board"]] if row["board"] else split_boards(row["boards"])
    return [(row["suite"], row["flow"], board) for board in boards]


def _make_row(
    row: sqlite3.Row,
    number: int,
    layers: Mapping[str, Sequence[BisectedLayer]],
    timed: Mapping[tuple[int, str], int],
) -> ChangedRow:
    ratio = row["after"] / row["before"] if row["after"] and row["before"] else None
    is_broken = row["what"] == BROKE
    outcome = (row["ended"] or row["outcome"]) if is_broken else ""
    wrong = layers.get(row["model"], ()) if is_broken else ()
    change = ChangedCase(
        row["name"],
        row["what"],
        row["board"],
        night_of(row["created"]),
        suite=row["suite"],
        flow=row["flow"],
        runtime=row["runtime"],
        model=row["model"],
        op=row["op"],
        layer=next((one.name for one in wrong if one.explains(row["op"], outcome, row["created"])), ""),
        outcome=outcome,
        tools=(
            *list_changed_tools(row["earlier"], row["versions"]),
            *list_changed_tools(row["earlier_stack"], row["stack"]),
        ),
        ratio=ratio,
        timed=timed.get((row["session"], row["board"]), 0),
        number=number,
    )
    return ChangedRow(
        change,
        row["created"],
        row["before"],
        row["after"],
        row["kind"],
        link_of(row["id"], row["root"]),
        row["title"],
        row["commit_id"] or "",
        row["earlier_commit"] or "",
        row["message"],
    )


def list_changed_tools(earlier: str | None, now: str | None) -> tuple[str, ...]:
    """Return the tools with different versions in two sessions, from the JSON texts of the index."""
    was, versions = (json.loads(text or "{}") for text in (earlier, now))
    return tuple(
        f"{name} {was[name]} -> {versions[name]}"
        for name in sorted(was.keys() & versions.keys() - _NO_TOOLS)
        if was[name] != versions[name] and was[name] and versions[name]
    )


def _count_timed(database: sqlite3.Connection, sessions: set[int]) -> dict[tuple[int, str], int]:
    """Return the number of measured cases per session and board."""
    rows = database.execute(
        "select session, word, count(*) from json_each(?) join cases on session = value"
        " join words on words.key = board where device_p50_ns > 0 group by session, board",
        (json.dumps(sorted(sessions)),),
    )
    return {(session, board): count for session, board, count in rows}

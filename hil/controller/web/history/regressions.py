"""List regressions from the index: cases that fail or are slower since a session (`judging.py`)."""

from __future__ import annotations

import calendar
import json
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from hil.controller.web.text.addresses import PageQuery, choose_page, format_reference, link_of
from hil.controller.web.text.parameters import InvalidParameter

ROWS = 100
_YEAR_SECONDS = 365 * 86400.0


@dataclass(frozen=True)
class RegressionFilter(PageQuery):
    """Query parameters for regressions. "" matches all."""

    since: str = ""  # date as YYYY-MM-DD; "" is a year ago
    what: str = field(default="", metadata={"choices": ("broke", "slower")})
    q: str = ""  # words that the case name must contain
    now: str = ""  # if not empty, only current regressions
    page: int = 1


@dataclass(frozen=True)
class Regression:
    """Case that fails or is slower since a session."""

    case: str
    what: str
    created: float | None
    over: bool
    before: float | None
    after: float | None
    history: str  # query for the case's history
    link: str  # query for the session
    compare: str  # query that compares the sessions before and after
    # befores, afters: number of compared sessions before and after the change
    befores: int
    afters: int
    title: str
    board: str
    commit: str
    earlier_commit: str
    message: str

    @property
    def ratio(self) -> float | None:
        """Ratio after / before, or None if undefined."""
        return self.after / self.before if self.after and self.before else None


@dataclass(frozen=True)
class RegressionPage:
    """Page of regressions, and the total number."""

    found: Sequence[Regression]
    total: int
    pages: int
    unjudged: int  # number of histories that are not judged yet


def list_regressions(database: sqlite3.Connection, asked: RegressionFilter, rows: int = ROWS) -> RegressionPage:
    """Return regressions since a date, newest first. Raises UsageError for an invalid date."""
    parts, values = ["changes.created >= ?"], list[Any]([parse_since(asked.since)])
    if asked.what:
        parts.append("what = ?")
        values.append(asked.what)
    if asked.now:
        parts.append("not over")
    for word in asked.q.split():
        parts.append("name in (select key from words where instr(lower(word), ?))")
        values.append(word.lower())
    where = " and ".join(parts)
    total = int(database.execute(f"select count(*) from changes where {where}", values).fetchone()[0])
    first, pages = choose_page(asked.page, total, rows)
    found = database.execute(
        f"select * from changes where {where} order by created desc, session, name limit ? offset ?",
        (*values, rows, first),
    ).fetchall()
    unjudged = int(database.execute("select count(*) from unjudged").fetchone()[0])
    names: dict[int, str] = {}
    return RegressionPage([_make_regression(database, row, names) for row in found], total, pages, unjudged)


def parse_since(day: str) -> float:
    """Parse a date as seconds since the epoch (UTC). "" is a year ago. Raises UsageError if invalid."""
    if not day:
        return time.time() - _YEAR_SECONDS
    try:
        return float(calendar.timegm(time.strptime(day, "%Y-%m-%d")))
    except ValueError as error:
        raise InvalidParameter(f"invalid date {day[:40]!r}", hint="expected YYYY-MM-DD") from error


def _make_regression(database: sqlite3.Connection, row: sqlite3.Row, names: dict[int, str]) -> Regression:
    """Convert a row of ``changes``. ``names`` caches session references by key."""
    now, was = (
        database.execute("select * from sessions where key = ?", (row[key],)).fetchone()
        for key in ("session", "earlier")
    )
    case = (
        database.execute(
            "select (select word from words where key = name), (select word from words where key = flow),"
            " (select word from words where key = runtime), (select word from words where key = board),"
            " (select word from words where key = model), (select word from words where key = message)"
            " from cases where session = ? and name = ?",
            (row["session"], row["name"]),
        ).fetchone()
        or ("",) * 6
    )
    name, flow, runtime, board, model, message = case
    identity = {"case": name, "flow": flow, "runtime": runtime, "board": board, "model": model}
    identity |= {"kind": now["kind"], "suite": now["suite"]} if now else {}
    befores, afters = ([_make_reference(database, key, names) for key in side] for side in json.loads(row["compared"]))
    return Regression(
        case=name,
        what=row["what"],
        created=row["created"],
        over=bool(row["over"]),
        before=row["before"],
        after=row["after"],
        history=urlencode({key: value for key, value in identity.items() if value}),
        link=link_of(now["id"], now["root"]) if now else "",
        compare=urlencode({"a": befores, "b": afters}, doseq=True) if befores and afters else "",
        befores=len(befores),
        afters=len(afters),
        title=now["title"] if now else "",
        board=board,
        commit=now["commit_id"] if now else "",
        earlier_commit=was["commit_id"] if was else "",
        message=message,
    )


def _make_reference(database: sqlite3.Connection, key: int, names: dict[int, str]) -> str:
    """Return the session reference for a comparison URL."""
    if key not in names:
        row = database.execute("select root, id from sessions where key = ?", (key,)).fetchone()
        names[key] = format_reference(row["id"], row["root"]) if row else ""
    return names[key]

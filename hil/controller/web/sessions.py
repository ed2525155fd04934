"""What pages ask of the index about sessions and their cases."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hil.controller.web.addresses import Asked, link_of, page_at, reference_of
from hil.controller.web.index import NUMBERS, SEPARATOR, WORDS
from hil.controller.web.names import meant
from hil.errors import UsageError

PAGE_ROWS = 100
# Shorter texts are looked for in a session's title, id and names alone: the index of texts has three letters at least.
_TRIGRAM = 3
_LISTS = ("models", "boards", "runtimes", "compilers", "labels")
_EQUAL = {"kind": "kind", "suite": "suite", "flow": "flow", "verdict": "verdict", "branch": "branch"}
_ORDERS = {
    "created": "created",
    "title": "title",
    "cases": "cases",
    "failing": "failing",
}


@dataclass(frozen=True)
class SessionFilter(Asked):
    """Which sessions: the query of the page's address. "" is any."""

    q: str = ""  # a text that occurs in it
    kind: str = ""
    verdict: str = ""
    model: str = ""
    board: str = ""
    runtime: str = ""
    compiler: str = ""
    label: str = ""
    branch: str = ""
    commit: str = ""  # the beginning of it
    suite: str = ""
    flow: str = ""
    order: str = ""  # a column, with "-" before it from the largest down; "" is the newest first
    page: int = 1


@dataclass(frozen=True)
class Session:
    """A session as a page shows it."""

    key: int
    id: str
    root: int
    folder: str
    kind: str
    title: str
    created: float | None
    finished: bool
    exit_code: int | None
    suite: str
    place: str  # the folder that its models are of; "" where it is hil's own suite, or nobody knows
    flow: str
    branch: str
    commit: str
    command: str
    error: str
    lines: str
    verdict: str
    planned: int
    cases: int
    failing: int
    damaged: int
    # the sum of its cases' device times, of those that were measured well enough to be compared, and how many these are
    device_ns: float | None = None
    device_cases: int = 0
    boards: Sequence[str] = ()
    runtimes: Sequence[str] = ()
    compilers: Sequence[str] = ()
    models: Sequence[str] = ()
    labels: Sequence[str] = ()
    outcomes: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)  # model -> digest of its file, where that is known

    @property
    def link(self) -> str:
        """The query that names it in addresses."""
        return link_of(self.id, self.root)

    @property
    def reference(self) -> str:
        """What names it in one word of an address."""
        return reference_of(self.id, self.root)


def _session(row: sqlite3.Row) -> Session:
    values = {name: row[name] for name in row.keys() if name not in ("commit_id", "stamp", "read_bytes")}  # noqa: SIM118 - iterating over a row gives its values
    values |= {name: [one for one in (row[name] or "").split(SEPARATOR) if one] for name in _LISTS}
    values |= {name: json.loads(row[name] or "{}") for name in ("outcomes", "versions", "digests")}
    return Session(
        **{
            **values,
            "folder": meant(row["folder"] or ""),
            "commit": row["commit_id"] or "",
            "finished": bool(row["finished"]),
        }
    )


@dataclass(frozen=True)
class SessionPage:
    """A page of sessions, and how many there are in all."""

    sessions: Sequence[Session]
    total: int
    pages: int


def list_sessions(database: sqlite3.Connection, asked: SessionFilter, rows: int = PAGE_ROWS) -> SessionPage:
    """The sessions that a filter finds, a page of them. Raises UsageError: there is no such order."""
    where, values = _where(asked)
    total = int(database.execute(f"select count(*) from sessions where {where}", values).fetchone()[0])
    first, pages = page_at(asked.page, total, rows)
    found = database.execute(
        f"select * from sessions where {where} order by {_order(asked.order)} limit ? offset ?",
        (*values, rows, first),
    )
    return SessionPage([_session(row) for row in found], total, pages)


def sessions_where(database: sqlite3.Connection, condition: str, values: Sequence[Any]) -> list[Session]:
    """Sessions by a condition of our own on their table."""
    return [_session(row) for row in database.execute(f"select * from sessions where {condition}", values)]


def _order(order: str) -> str:
    if not order:
        return "created desc, key desc"
    column = _ORDERS.get(order.removeprefix("-"))
    if column is None:
        raise UsageError(f"sessions cannot be ordered by {order!r}", hint=f"one of {', '.join(_ORDERS)}")
    return f"{column} {'desc' if order.startswith('-') else 'asc'}, key desc"


def _where(asked: SessionFilter) -> tuple[str, list[Any]]:
    parts, values = ["1"], list[Any]()
    for name, column in _EQUAL.items():
        if value := getattr(asked, name):
            parts.append(f"{column} = ?")
            values.append(value)
    for name in _LISTS:
        if value := getattr(asked, name.removesuffix("s")):
            parts.append(f"instr({name}, ?)")
            values.append(f"{SEPARATOR}{value}{SEPARATOR}")
    if asked.commit:
        parts.append("substr(commit_id, 1, length(?)) = ?")
        values += [asked.commit, asked.commit]
    for word in asked.q.split():
        if len(word) >= _TRIGRAM:
            parts.append("key in (select rowid from session_texts where text match ?)")
            values.append('"' + word.replace('"', '""') + '"')
        else:
            parts.append("(instr(lower(title), ?) or instr(lower(id), ?) or instr(lower(models), ?))")
            values += [word.lower()] * 3
    return " and ".join(parts), values


def choices(database: sqlite3.Connection) -> dict[str, list[str]]:
    """What filters can be set to: of each, the values that sessions have."""
    found: dict[str, list[str]] = {}
    for name, column in _EQUAL.items():
        rows = database.execute(f"select distinct {column} from sessions where {column} != '' order by 1 limit 500")
        found[name] = [row[0] for row in rows]
    for column in _LISTS:
        rows = database.execute(f"select distinct {column} from sessions where {column} != '' limit 2000")
        names = {name for row in rows for name in row[0].split(SEPARATOR) if name}
        found[column.removesuffix("s")] = sorted(names)[:500]
    return found


def find_session(database: sqlite3.Connection, session_id: str, root: int = 0) -> Session:
    """A session by its id. Raises UsageError: there is none."""
    row = database.execute("select * from sessions where id = ? and root = ?", (session_id, root)).fetchone()
    if row is None:
        raise UsageError(
            f"there is no session {session_id!r}", hint="it may have been deleted; see the list of sessions"
        )
    return _session(row)


_CASE_ORDERS = {
    "number": "number",
    "name": "name",
    "op": "op",
    "outcome": "outcome",
    "time": "device_p50_ns",
    "host": "host_s",
    "abs": "max_abs",
    "ulp": "max_ulp",
    "sqnr": "sqnr_db",
}
_CASE_COLUMNS = (
    *(f"(select word from words where words.key = cases.{name}) as {name}" for name in WORDS),
    "session",
    *NUMBERS,
)
SELECT_CASES = f"select {', '.join(_CASE_COLUMNS)} from cases"


@dataclass(frozen=True)
class CaseFilter(Asked):
    """Which cases of a session: the query of the page's address. "" is any."""

    q: str = ""  # a text that occurs in the case's name
    outcome: str = ""  # a word, or "failing"
    op: str = ""
    model: str = ""
    order: str = ""
    page: int = 1


@dataclass(frozen=True)
class CasePage:
    """A page of cases, and how many there are in all."""

    cases: Sequence[sqlite3.Row]
    total: int
    pages: int


PASSING = ("PASS", "XFAIL", "SKIP")


def list_cases(database: sqlite3.Connection, session: Session, asked: CaseFilter, rows: int = PAGE_ROWS) -> CasePage:
    """A session's cases, a page of them. Raises UsageError: there is no such order."""
    where, values = _where_cases(session, asked)
    column = _CASE_ORDERS.get(asked.order.removeprefix("-") or "number")
    if column is None:
        raise UsageError(f"cases cannot be ordered by {asked.order!r}", hint=f"one of {', '.join(_CASE_ORDERS)}")
    direction = "desc" if asked.order.startswith("-") else "asc"
    shown = f"(select word from words where words.key = {column})" if column in WORDS else column
    order = f"sought {direction} nulls last, seen"
    values |= {"rows": rows, "skip": (max(1, asked.page) - 1) * rows}
    hits = f"select name as hit, number as seen, {shown} as sought from cases where {where}"
    if asked.q.split():
        # To look for a text takes longest: it is filtered and counted in one pass.
        begin, source, total = f"with hits as materialized ({hits}), ", "hits", "(select count(*) from hits)"
    else:
        count = database.execute(f"select count(*) from cases where {where}", values).fetchone()[0]
        begin, source, total = "with ", f"({hits})", str(int(count))
    # The columns of a page's cases alone are fetched. What is beyond the last page is the last page.
    last_page = f"max(0, ({total} - 1) / :rows * :rows)"
    found = database.execute(
        f"{begin}shown as (select * from {source} order by {order} limit :rows offset min(:skip, {last_page})) "
        f"select {', '.join(_CASE_COLUMNS)}, {total} as total "
        f"from shown join cases on session = :session and cases.name = hit order by {order}",
        values,
    ).fetchall()
    counted = int(found[0]["total"]) if found else 0
    return CasePage(found, counted, max(1, -(-counted // rows)))


def _where_cases(session: Session, asked: CaseFilter) -> tuple[str, dict[str, Any]]:
    parts, values = ["session = :session"], dict[str, Any](session=session.key)
    for name in ("outcome", "op", "model"):
        value = getattr(asked, name)
        if name == "outcome" and value == "failing":
            passing = ", ".join(f"'{word}'" for word in PASSING)
            parts.append(f"outcome not in (select key from words where word in ({passing}))")
        elif value:
            parts.append(f"{name} = (select key from words where word = :{name})")
            values[name] = value
    for number, word in enumerate(asked.q.split()):
        # Of the session's names alone: among all words most are reasons of failures.
        parts.append(f"instr((select lower(word) from words where key = cases.name), :q{number})")
        values[f"q{number}"] = word.lower()
    return " and ".join(parts), values


def find_case(database: sqlite3.Connection, session: Session, name: str) -> sqlite3.Row:
    """A case by its name. Raises UsageError: the session has none of that name."""
    row: sqlite3.Row | None = database.execute(
        f"{SELECT_CASES} where session = ? and name = (select key from words where word = ?)", (session.key, name)
    ).fetchone()
    if row is None:
        raise UsageError(f"{session.id} has no case {name!r}", hint="see the session's table of cases")
    return row

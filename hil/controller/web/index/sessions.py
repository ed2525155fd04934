"""Queries for sessions and cases in the index."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hil.controller.storage.outcomes import classify_outcome
from hil.controller.web.index.index import NUMBERS, SEPARATOR, WORDS
from hil.controller.web.text.addresses import PageQuery, choose_page, format_reference, link_of
from hil.controller.web.text.entries import KINDS
from hil.controller.web.text.names import unescape_name
from hil.controller.web.text.parameters import InvalidParameter
from hil.core.results import Outcome
from hil.errors import UsageError

PAGE_ROWS = 100
# The trigram index needs three characters. Shorter words are only searched in titles, ids and model names.
_TRIGRAM = 3
_LISTS = ("models", "boards", "runtimes", "compilers", "labels")
# Kinds of sessions; "damaged" is a session with an unreadable record.
SESSION_KINDS = ("run", "suite", "bench", "bisect", "study", "gate", "eval", "trace", "matrix", "damaged")
_EQUAL = {"kind": "kind", "suite": "suite", "flow": "flow", "verdict": "verdict", "branch": "branch"}
_ORDERS = {
    "created": "created",
    "title": "title",
    "cases": "cases",
    "failing": "failing",
}


@dataclass(frozen=True)
class SessionFilter(PageQuery):
    """Query parameters for sessions. "" matches all."""

    q: str = ""  # words to search for
    kind: str = field(default="", metadata={"choices": SESSION_KINDS})
    verdict: str = field(default="", metadata={"choices": KINDS})
    model: str = ""
    board: str = ""
    runtime: str = ""
    compiler: str = ""
    label: str = ""
    branch: str = ""
    commit: str = ""  # a prefix
    suite: str = ""
    flow: str = ""
    order: str = ""  # column, with "-" for descending order; "" is newest first
    page: int = 1


@dataclass(frozen=True)
class IndexedSession:
    """Session as pages show it."""

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
    place: str  # directory of the models; "" for a built-in suite, or if unknown
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
    # sum of the device times that have enough iterations for a comparison, and number of these cases
    device_ns: float | None = None
    device_cases: int = 0
    boards: Sequence[str] = ()
    runtimes: Sequence[str] = ()
    compilers: Sequence[str] = ()
    models: Sequence[str] = ()
    labels: Sequence[str] = ()
    outcomes: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    stack: Mapping[str, str] | None = None  # part of the board's stack -> version; None without a stack
    digests: Mapping[str, str] = field(default_factory=dict)  # model -> digest of its file, if known

    @property
    def outcomes_by_severity(self) -> list[tuple[str, int]]:
        """Outcomes with their numbers of cases, most severe first."""
        return sorted(self.outcomes.items(), key=lambda one: KINDS.index(classify_outcome(one[0])))

    @property
    def link(self) -> str:
        """Query that identifies the session."""
        return link_of(self.id, self.root)

    @property
    def reference(self) -> str:
        """Text that identifies the session in a single URL parameter."""
        return format_reference(self.id, self.root)


def _make_session(row: sqlite3.Row) -> IndexedSession:
    values = {name: row[name] for name in row.keys() if name not in ("commit_id", "stamp", "read_bytes")}  # noqa: SIM118 - iterating over a row gives its values
    values |= {name: [one for one in (row[name] or "").split(SEPARATOR) if one] for name in _LISTS}
    values |= {name: json.loads(row[name] or "{}") for name in ("outcomes", "versions", "digests")}
    values["stack"] = json.loads(row["stack"]) if row["stack"] else None
    return IndexedSession(
        **{
            **values,
            "folder": unescape_name(row["folder"] or ""),
            "commit": row["commit_id"] or "",
            "finished": bool(row["finished"]),
        }
    )


@dataclass(frozen=True)
class SessionPage:
    """Page of sessions, and the total number."""

    sessions: Sequence[IndexedSession]
    total: int
    pages: int


def list_sessions(database: sqlite3.Connection, asked: SessionFilter, rows: int = PAGE_ROWS) -> SessionPage:
    """Return a page of matching sessions. Raises UsageError for an unknown order."""
    where, values = _make_session_condition(asked)
    total = int(database.execute(f"select count(*) from sessions where {where}", values).fetchone()[0])
    first, pages = choose_page(asked.page, total, rows)
    found = database.execute(
        f"select * from sessions where {where} order by {_order_clause(asked.order)} limit ? offset ?",
        (*values, rows, first),
    )
    return SessionPage([_make_session(row) for row in found], total, pages)


def list_sessions_where(database: sqlite3.Connection, condition: str, values: Sequence[Any]) -> list[IndexedSession]:
    """Return sessions that match an SQL condition. The condition must not contain user input."""
    return [_make_session(row) for row in database.execute(f"select * from sessions where {condition}", values)]


def _order_clause(order: str) -> str:
    if not order:
        return "created desc, key desc"
    column = _ORDERS.get(order.removeprefix("-"))
    if column is None:
        raise InvalidParameter.choose("session order", order, _ORDERS)
    return f"{column} {'desc' if order.startswith('-') else 'asc'}, key desc"


def _make_session_condition(asked: SessionFilter) -> tuple[str, list[Any]]:
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


def list_choices(database: sqlite3.Connection) -> dict[str, list[str]]:
    """Return the possible values of every filter."""
    found: dict[str, list[str]] = {}
    for name, column in _EQUAL.items():
        rows = database.execute(f"select distinct {column} from sessions where {column} != '' order by 1 limit 500")
        found[name] = [row[0] for row in rows]
    for column in _LISTS:
        rows = database.execute(f"select distinct {column} from sessions where {column} != '' limit 2000")
        names = {name for row in rows for name in row[0].split(SEPARATOR) if name}
        found[column.removesuffix("s")] = sorted(names)[:500]
    return found


def find_session(database: sqlite3.Connection, session_id: str, root: int = 0) -> IndexedSession:
    """Return a session by id. Raises UsageError if the session is missing."""
    row = database.execute("select * from sessions where id = ? and root = ?", (session_id, root)).fetchone()
    if row is None:
        raise UsageError(
            f"session {session_id!r} not found", hint="the session may have been deleted; see the list of sessions"
        )
    return _make_session(row)


def resolve_session(database: sqlite3.Connection, session_id: str, root: int = 0) -> IndexedSession:
    """Return the session of a URL. Raises UsageError if the session is missing or ambiguous.

    The number of the directory is only necessary if multiple directories have a session with this id. An id may lack
    its first directories: hil prints URLs without knowing which directories a server has.
    """
    try:
        return find_session(database, session_id, root)
    except UsageError:
        if not session_id:
            raise
        named = list_sessions_where(database, "id = ? limit 3", (session_id,))
        ending = f"/{session_id}"
        found = named or list_sessions_where(
            database, "substr(id, -length(?)) = ? order by created desc limit 3", (ending, ending)
        )
        if not found:
            raise
    if len(found) > 1:
        others = ", ".join(f"id={one.id}&root={one.root}" for one in found)
        raise UsageError(f"several sessions are called {session_id!r}", hint=f"use one of {others}")
    return found[0]


def link_runs(database: sqlite3.Connection, runs: Collection[str]) -> dict[str, str]:
    """Return the URL query for the session of each indexed run.

    Args:
        runs: IDs of runs, which are also the names of their directories.
    """
    found: dict[str, str] = {}
    for session_id, root in database.execute("select id, root from sessions order by root desc") if runs else ():
        if (name := session_id.rpartition("/")[2]) in runs:
            found[name] = link_of(session_id, root)
    return found


def _rank_outcomes() -> str:
    """Return an SQL expression with the severity of an outcome. A case that did not run is the least severe."""
    ranks = {kind: len(KINDS) - place for place, kind in enumerate(KINDS)}
    words = [f"when {one.value!r} then {ranks[classify_outcome(one.value)]}" for one in Outcome]
    return f"(select case word {' '.join(words)} else 0 end from words where words.key = cases.outcome)"


PASSING = ("PASS", "XFAIL", "SKIP")
_PASSING_KEYS = f"(select key from words where word in ({', '.join(repr(word) for word in PASSING)}))"
_FAILING = f"outcome not in {_PASSING_KEYS}"
# Failing cases first. Cases with the same rank keep the order of the session.
FAILING_FIRST = "failing"
_CASE_ORDERS = {
    FAILING_FIRST: f"(outcome in {_PASSING_KEYS})",
    "number": "number",
    "name": "name",
    "op": "op",
    "outcome": _rank_outcomes(),
    "time": "device_p50_ns",
    "host": "host_s",
    "energy": "joules",
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
class CaseFilter(PageQuery):
    """Query parameters for the cases of a session. "" matches all."""

    q: str = ""  # words that the case name must contain
    outcome: str = ""  # an outcome, or "failing"
    op: str = ""
    model: str = ""
    order: str = ""
    page: int = 1


@dataclass(frozen=True)
class CasePage:
    """Page of cases, and the total number."""

    cases: Sequence[sqlite3.Row]
    total: int
    pages: int


def list_cases(
    database: sqlite3.Connection, session: IndexedSession, asked: CaseFilter, rows: int = PAGE_ROWS
) -> CasePage:
    """Return a page of a session's cases. Raises UsageError for an unknown order."""
    where, values = _make_case_condition(session, asked)
    column = _CASE_ORDERS.get(asked.order.removeprefix("-") or "number")
    if column is None:
        raise InvalidParameter.choose("case order", asked.order, _CASE_ORDERS)
    direction = "desc" if asked.order.startswith("-") else "asc"
    shown = f"(select word from words where words.key = {column})" if column in WORDS else column
    order = f"sought {direction} nulls last, seen"
    values |= {"rows": rows, "skip": (max(1, asked.page) - 1) * rows}
    hits = f"select name as hit, number as seen, {shown} as sought from cases where {where}"
    if asked.q.split():
        # Text search is slowest, so filter and count in one pass.
        begin, source, total = f"with hits as materialized ({hits}), ", "hits", "(select count(*) from hits)"
    else:
        count = database.execute(f"select count(*) from cases where {where}", values).fetchone()[0]
        begin, source, total = "with ", f"({hits})", str(int(count))
    # Fetch columns only for the cases of this page. Page numbers beyond the end show the last page.
    last_page = f"max(0, ({total} - 1) / :rows * :rows)"
    found = database.execute(
        f"{begin}shown as (select * from {source} order by {order} limit :rows offset min(:skip, {last_page})) "
        f"select {', '.join(_CASE_COLUMNS)}, {total} as total "
        f"from shown join cases on session = :session and cases.name = hit order by {order}",
        values,
    ).fetchall()
    counted = int(found[0]["total"]) if found else 0
    return CasePage(found, counted, max(1, -(-counted // rows)))


def _make_case_condition(session: IndexedSession, asked: CaseFilter) -> tuple[str, dict[str, Any]]:
    parts, values = ["session = :session"], dict[str, Any](session=session.key)
    for name in ("outcome", "op", "model"):
        value = getattr(asked, name)
        if name == "outcome" and value == "failing":
            parts.append(_FAILING)
        elif value:
            parts.append(f"{name} = (select key from words where word = :{name})")
            values[name] = value
    for number, word in enumerate(asked.q.split()):
        # Search only the names in this session, because most other texts in the table are failure messages.
        parts.append(f"instr((select lower(word) from words where key = cases.name), :q{number})")
        values[f"q{number}"] = word.lower()
    return " and ".join(parts), values


def iter_failing_cases(database: sqlite3.Connection, session: IndexedSession) -> Iterator[tuple[int, str]]:
    """Yield the number and the name of every failing case of a session, in order."""
    names = "(select word from words where words.key = cases.name)"
    query = f"select number, {names} from cases where session = ? and {_FAILING} order by number"
    return ((int(number), str(name)) for number, name in database.execute(query, (session.key,)))


def count_failing_cases(database: sqlite3.Connection, session: IndexedSession, number: int) -> tuple[int, int]:
    """Return the number of a session's failing cases up to a case number, and in total."""
    query = f"select count(*) filter (where number <= ?), count(*) from cases where session = ? and {_FAILING}"
    up_to, total = database.execute(query, (number, session.key)).fetchone()
    return int(up_to), int(total)


def find_case(database: sqlite3.Connection, session: IndexedSession, name: str) -> sqlite3.Row:
    """Return a case by name. Raises UsageError if the case is missing."""
    row: sqlite3.Row | None = database.execute(
        f"{SELECT_CASES} where session = ? and name = (select key from words where word = ?)", (session.key, name)
    ).fetchone()
    if row is None:
        raise UsageError(f"case {name!r} not found in {session.id}", hint="see the session's table of cases")
    return row

"""Select the sessions on both sides of a comparison, from a URL query."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from hil.controller.web.index.index import join_names
from hil.controller.web.index.sessions import (
    IndexedSession,
    SessionFilter,
    list_sessions,
    list_sessions_where,
    resolve_session,
)
from hil.controller.web.text.addresses import ROOT_MARK
from hil.controller.web.text.roots import MAX_DIGITS
from hil.errors import UsageError

# Maximum and default number of sessions per side. A filter selects the newest sessions.
MAX_SESSIONS = 50
USUAL_SESSIONS = 10
# Filters for a side, in the form's order.
FILTERS = ("suite", "flow", "board", "runtime", "compiler", "label", "branch", "commit", "model", "kind")
# URL parameters of both sides.
PARAMETERS = ("a", "b", "a.last", "b.last", *(f"{side}.{name}" for side in "ab" for name in FILTERS))
# Filters that also select cases, because a session's cases may have different boards.
CASE_FILTERS = ("board", "runtime", "model", "flow")


@dataclass(frozen=True)
class ComparedSide:
    """Sessions that form a side of a comparison."""

    sessions: Sequence[IndexedSession]  # newest first
    only: Mapping[str, str] = field(default_factory=dict)  # the filter; CASE_FILTERS also apply to cases
    left_out: int = 0  # number of matching sessions beyond ``last``
    last: int = 0  # requested number of sessions
    named: bool = True  # True if the URL names the sessions, False for a filter
    offered: bool = False  # True for a default baseline that the user did not choose

    @property
    def name(self) -> str:
        """Name for use in a sentence."""
        words = [f"{key} {value}" for key, value in self.only.items()]
        if len(self.sessions) == 1:
            words.insert(0, self.sessions[0].title)
        elif not words:
            words.append(f"{len(self.sessions)} sessions")
        return ", ".join(words)


def get_session(database: sqlite3.Connection, reference: str) -> IndexedSession:
    """Return the session for a reference. Raises UsageError if the session is missing."""
    root, mark, rest = reference.partition(ROOT_MARK)
    if mark and root.isdecimal() and len(root) <= MAX_DIGITS:
        return resolve_session(database, rest, int(root))
    return resolve_session(database, reference)


def choose_side(
    database: sqlite3.Connection, references: Sequence[str], only: Mapping[str, str], last: int = USUAL_SESSIONS
) -> ComparedSide | None:
    """Return a side with the given sessions, or with the newest sessions that match a filter.

    Returns:
        The side, or None without references and filter.

    Raises:
        UsageError: a session is missing, no session matches, or there are too many references.
    """
    only = {name: only[name] for name in FILTERS if only.get(name)}
    references = list(dict.fromkeys(references))
    if len(references) > MAX_SESSIONS:
        raise UsageError(f"{len(references)} sessions on a side, at most {MAX_SESSIONS} are allowed")
    if references:
        found = [get_session(database, one) for one in references]
        return ComparedSide(sorted(found, key=lambda one: -(one.created or 0.0)), only)
    if not only:
        return None
    last = min(max(last, 1), MAX_SESSIONS)
    given: dict[str, Any] = {**only}
    page = list_sessions(database, SessionFilter(**given), last)
    if not page.sessions:
        what = ", ".join(f"{name} {value}" for name, value in only.items())
        raise UsageError(f"sessions with {what} not found", hint="see the list of sessions")
    return ComparedSide(page.sessions[:last], only, left_out=max(page.total - last, 0), last=last, named=False)


def find_baseline(database: sqlite3.Connection, session: IndexedSession) -> IndexedSession | None:
    """Return the previous session with the same kind, suite, flow, boards, runtimes, and if possible models.

    For a suite, prefer a session from the same directory, because suites in other directories can have the same name.
    Return None if no session matches.
    """
    same = {name: getattr(session, name) for name in ("kind", "suite", "flow")}
    lists = {name: getattr(session, name) for name in ("boards", "runtimes")}
    if session.kind != "suite":
        return _find_previous(database, session, same, {**lists, "models": session.models})
    models = {**lists, "models": session.models}
    here = {**same, "place": session.place}
    tried = (
        _find_previous(database, session, *one)
        for one in ((here, models), (here, lists), (same, models), (same, lists))
    )
    return next(filter(None, tried), None)


def _find_previous(
    database: sqlite3.Connection, session: IndexedSession, same: Mapping[str, Any], lists: Mapping[str, Sequence[str]]
) -> IndexedSession | None:
    values = {**same, **{name: join_names(names) for name, names in lists.items()}}
    where = " and ".join(f"{name} = ?" for name in values)
    found = list_sessions_where(
        database,
        f"{where} and error = '' and cases > 0 and (created, key) < (?, ?) order by created desc, key desc limit 1",
        (*values.values(), session.created or 0.0, session.key),
    )
    return found[0] if found else None


def query_of(a: ComparedSide | None, b: ComparedSide | None, **other: Any) -> str:
    """Return the query for both sides and other parameters."""
    pairs: list[tuple[str, Any]] = []
    for letter, side in (("a", a), ("b", b)):
        if side is None or side.offered:
            continue
        pairs += [(f"{letter}.{name}", value) for name, value in side.only.items()]
        if side.named:
            pairs += [(letter, one.reference) for one in side.sessions]
        else:
            pairs.append((f"{letter}.last", side.last))
    pairs += [(name, value) for name, value in other.items() if value not in ("", None)]
    return urlencode(pairs)


def iter_differences(a: ComparedSide, b: ComparedSide) -> Iterable[str]:
    """Yield sentences about differences between the sides, other than results."""
    for what, name in (("kind", "kind"), ("suite", "suite"), ("flow", "flow"), ("place", "suite directory")):
        yield from _describe_difference(name, *({getattr(one, what) for one in side.sessions} for side in (a, b)))
    for what in ("boards", "runtimes", "compilers"):
        yield from _describe_difference(
            what, *({name for one in side.sessions for name in getattr(one, what)} for side in (a, b))
        )
    tools = sorted({tool for side in (a, b) for one in side.sessions for tool in one.versions})
    for tool in tools:
        yield from _describe_difference(
            tool, *({one.versions.get(tool, "-") for one in side.sessions} for side in (a, b))
        )
    yield from _describe_models(a, b)
    for side, when in ((a, "before"), (b, "after")):
        for one in side.sessions:
            if one.planned > one.cases:
                yield f"{when}: {one.planned - one.cases} of {one.planned} cases of {one.id} were not run"
            if one.damaged:
                yield f"{when}: {one.damaged} lines of {one.id} are unreadable"


def _describe_models(a: ComparedSide, b: ComparedSide) -> Iterable[str]:
    """Yield the models with different digests, which may explain different results."""
    before, after = ([pair for one in side.sessions for pair in one.digests.items()] for side in (a, b))
    for name in sorted({name for name, _ in before} & {name for name, _ in after}):
        was, now = ({digest for one, digest in pairs if one == name} for pairs in (before, after))
        if was != now:
            yield from _describe_difference(
                f"model {name} changed", *({_shorten_digest(one) for one in files} for files in (was, now))
            )


def _shorten_digest(digest: str) -> str:
    return digest.rpartition(":")[2][:12]


def _describe_difference(what: str, before: set[str], after: set[str]) -> Iterable[str]:
    if before != after:
        was, now = (", ".join(sorted(filter(None, names))[:8]) or "-" for names in (before, after))
        yield f"{what}: {was} before, {now} after"


def parse_filters(values: Mapping[str, str], letter: str) -> dict[str, str]:
    """Return the filter of a side from query parameters such as ``a.board=x``."""
    return {name: values[f"{letter}.{name}"] for name in FILTERS if values.get(f"{letter}.{name}")}

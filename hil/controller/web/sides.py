"""The two sides of a comparison: which sessions each has, as an address names them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from hil.controller.web.addresses import ROOT_MARK
from hil.controller.web.index import joined
from hil.controller.web.sessions import (
    Session,
    SessionFilter,
    find_session,
    list_sessions,
    sessions_where,
)
from hil.errors import UsageError

# So many sessions a side are compared: the newest that its filter finds, or as many as are named.
MOST_SESSIONS = 50
USUAL_SESSIONS = 10
# What a side's filter may be set to, in the order of the form.
FILTERS = ("suite", "flow", "board", "runtime", "compiler", "label", "branch", "commit", "model", "kind")
# Those of them that hold for each case: a session may have several boards.
CASE_FILTERS = ("board", "runtime", "model", "flow")


@dataclass(frozen=True)
class Side:
    """Sessions that are compared as one."""

    sessions: Sequence[Session]  # the newest first
    only: Mapping[str, str] = field(default_factory=dict)  # the filter: those of CASE_FILTERS hold for its cases too
    left_out: int = 0  # how many more sessions the filter finds
    last: int = 0  # how many it was to find
    named: bool = True  # whether an address names its sessions, and does not just filter
    offered: bool = False  # whether nobody chose it: it is the natural baseline

    @property
    def name(self) -> str:
        """What it is called in a sentence."""
        words = [f"{key} {value}" for key, value in self.only.items()]
        if len(self.sessions) == 1:
            words.insert(0, self.sessions[0].title)
        elif not words:
            words.append(f"{len(self.sessions)} sessions")
        return ", ".join(words)


def session_of(database: sqlite3.Connection, reference: str) -> Session:
    """The session that a word of an address names. Raises UsageError: there is none."""
    root, mark, rest = reference.partition(ROOT_MARK)
    if mark and root.isdecimal() and len(root) < 5:
        return find_session(database, rest, int(root))
    return find_session(database, reference)


def choose_side(
    database: sqlite3.Connection, references: Sequence[str], only: Mapping[str, str], last: int = USUAL_SESSIONS
) -> Side | None:
    """A side of named sessions, or of the newest that a filter finds; None where neither says anything.

    Raises:
        UsageError: there is no such session, none fits, or too many are named.
    """
    only = {name: only[name] for name in FILTERS if only.get(name)}
    references = list(dict.fromkeys(references))
    if len(references) > MOST_SESSIONS:
        raise UsageError(f"{len(references)} sessions on one side: {MOST_SESSIONS} at most are compared as one")
    if references:
        found = [session_of(database, one) for one in references]
        return Side(sorted(found, key=lambda one: -(one.created or 0.0)), only)
    if not only:
        return None
    last = min(max(last, 1), MOST_SESSIONS)
    given: dict[str, Any] = {**only}
    page = list_sessions(database, SessionFilter(**given), last)
    if not page.sessions:
        what = ", ".join(f"{name} {value}" for name, value in only.items())
        raise UsageError(f"no session has {what}", hint="see the list of sessions for what there is")
    return Side(page.sessions[:last], only, left_out=max(page.total - last, 0), last=last, named=False)


def baseline_of(database: sqlite3.Connection, session: Session) -> Session | None:
    """The session before this one that ran the same: kind, suite, flow, boards, runtimes, and models where it can be.

    Of a suite rather one of the same folder: others may have its name. None where there is none.
    """
    same = {name: getattr(session, name) for name in ("kind", "suite", "flow")}
    lists = {name: getattr(session, name) for name in ("boards", "runtimes")}
    if session.kind != "suite":
        return _before(database, session, same, {**lists, "models": session.models})
    models = {**lists, "models": session.models}
    here = {**same, "place": session.place}
    tried = (_before(database, session, *one) for one in ((here, models), (here, lists), (same, models), (same, lists)))
    return next(filter(None, tried), None)


def _before(
    database: sqlite3.Connection, session: Session, same: Mapping[str, Any], lists: Mapping[str, Sequence[str]]
) -> Session | None:
    values = {**same, **{name: joined(names) for name, names in lists.items()}}
    where = " and ".join(f"{name} = ?" for name in values)
    found = sessions_where(
        database,
        f"{where} and error = '' and cases > 0 and (created, key) < (?, ?) order by created desc, key desc limit 1",
        (*values.values(), session.created or 0.0, session.key),
    )
    return found[0] if found else None


def query_of(a: Side | None, b: Side | None, **other: Any) -> str:
    """An address's query that names both sides, and what else a page is asked."""
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


def differences(a: Side, b: Side) -> Iterable[str]:
    """Sentences on what is different besides the results."""
    for what, name in (("kind", "kind"), ("suite", "suite"), ("flow", "flow"), ("place", "the suite's folder")):
        yield from _told(name, *({getattr(one, what) for one in side.sessions} for side in (a, b)))
    for what in ("boards", "runtimes", "compilers"):
        yield from _told(what, *({name for one in side.sessions for name in getattr(one, what)} for side in (a, b)))
    tools = sorted({tool for side in (a, b) for one in side.sessions for tool in one.versions})
    for tool in tools:
        yield from _told(tool, *({one.versions.get(tool, "-") for one in side.sessions} for side in (a, b)))
    yield from _other_models(a, b)
    for side, when in ((a, "before"), (b, "after")):
        for one in side.sessions:
            if one.planned > one.cases:
                yield f"{when}: {one.planned - one.cases} of {one.planned} cases of {one.id} were not run"
            if one.damaged:
                yield f"{when}: {one.damaged} lines of {one.id} cannot be read"


def _other_models(a: Side, b: Side) -> Iterable[str]:
    """The models that have another digest: what differs may be theirs."""
    before, after = ([pair for one in side.sessions for pair in one.digests.items()] for side in (a, b))
    for name in sorted({name for name, _ in before} & {name for name, _ in after}):
        was, now = ({digest for one, digest in pairs if one == name} for pairs in (before, after))
        if was != now:
            yield from _told(f"the model {name} is another", *({_short(one) for one in files} for files in (was, now)))


def _short(digest: str) -> str:
    return digest.rpartition(":")[2][:12]


def _told(what: str, before: set[str], after: set[str]) -> Iterable[str]:
    if before != after:
        was, now = (", ".join(sorted(filter(None, names))[:8]) or "-" for names in (before, after))
        yield f"{what}: {was} before, {now} after"


def filters_of(values: Mapping[str, str], letter: str) -> dict[str, str]:
    """A side's filter out of an address's query: ``a.board=x``."""
    return {name: values[f"{letter}.{name}"] for name in FILTERS if values.get(f"{letter}.{name}")}

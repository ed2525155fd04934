"""Grid of the last nights: a row per suite and board, a cell per night with the outcomes of its newest session."""

from __future__ import annotations

import calendar
import json
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hil.controller.storage.outcomes import classify_outcome
from hil.controller.web.index.index import SEPARATOR
from hil.controller.web.text.addresses import link_of
from hil.controller.web.text.entries import KINDS, find_worst_kind
from hil.controller.web.text.parameters import InvalidParameter

NIGHTS = 14
NIGHT_SECONDS = 86400
# Maximum rows of the grid, and maximum sessions to read.
MAX_ROWS, _SESSIONS = 40, 5000
# Text for a kind of outcomes in a cell. Skipped cases and expected failures need no attention.
_TEXTS = {"board": "board", "error": "error", "fail": "fail", "pass": "pass", "quiet": "expected"}
_BAD = ("board", "error", "fail")


@dataclass(frozen=True)
class NightCell:
    """Newest session of a suite on a board in a night."""

    link: str  # query of the session
    title: str
    created: float
    verdict: str
    counts: Sequence[tuple[str, int]]  # kind of outcomes, number of cases; most severe first
    sessions: int  # sessions in this night

    @property
    def texts(self) -> list[tuple[str, str]]:
        """Kind and text of each count: ``("fail", "2 fail")``."""
        return [(kind, f"{count} {_TEXTS[kind]}") for kind, count in self.counts] or [(self.verdict, self.verdict)]

    @property
    def fails(self) -> bool:
        """True if a case failed."""
        return self.verdict in _BAD


@dataclass(frozen=True)
class NightRow:
    """Suite with a flow on a board."""

    suite: str
    flow: str
    board: str
    cells: Sequence[NightCell | None]  # newest night first; None without a session

    @property
    def newest(self) -> NightCell | None:
        """Cell of the newest night with a session."""
        return next((one for one in self.cells if one is not None), None)


@dataclass(frozen=True)
class NightGrid:
    """Rows with a cell per night. Rows whose newest session failed are first."""

    nights: Sequence[str]  # dates, newest first
    rows: Sequence[NightRow]
    left_out: int = 0  # rows beyond MAX_ROWS


def night_of(created: float) -> int:
    """Return the night of a time: the day in UTC, as days since the epoch."""
    return int(created // NIGHT_SECONDS)


def format_night(night: int) -> str:
    """Return the date of a night. Nights outside of the calendar become ""."""
    try:
        return time.strftime("%Y-%m-%d", time.gmtime(night * NIGHT_SECONDS))
    except (OverflowError, ValueError, OSError):
        return ""


def parse_night(day: str) -> int:
    """Return the night of a date. Raises UsageError if the date is invalid."""
    try:
        return calendar.timegm(time.strptime(day, "%Y-%m-%d")) // NIGHT_SECONDS
    except ValueError as error:
        raise InvalidParameter(f"invalid date {day[:40]!r}", hint="expected YYYY-MM-DD") from error


def list_nights(database: sqlite3.Connection, most: int, *, now: float | None = None) -> list[int]:
    """Return the newest nights with sessions of suites, newest first.

    Nights after tomorrow count only if there are no others: a session with a wrong clock must not hide the others.
    """
    after = (night_of(time.time() if now is None else now) + 2) * NIGHT_SECONDS
    return _list_nights_before(database, most, after) or _list_nights_before(database, most, math.inf)


def _list_nights_before(database: sqlite3.Connection, most: int, before: float) -> list[int]:
    found: list[int] = []
    while len(found) < most:
        row = database.execute(
            "select max(created) from sessions where suite != '' and created < ?", (before,)
        ).fetchone()
        if row[0] is None:
            break
        found.append(night_of(row[0]))
        before = found[-1] * NIGHT_SECONDS
    return found


def read_night_grid(
    database: sqlite3.Connection, *, now: float | None = None, most: int = MAX_ROWS, nights: int = NIGHTS
) -> NightGrid:
    """Read the grid of the last nights. Without recent sessions, the grid ends at the newest session.

    Args:
        most: maximum rows.
    """
    newest = list_nights(database, 1, now=now)
    if not newest:
        return NightGrid((), ())
    today = night_of(time.time() if now is None else now)
    # A session may be newer than this machine's clock.
    last = today if newest[0] > today - nights and newest[0] <= today else newest[0]
    span = range(last, last - nights, -1)
    rows = database.execute(
        "select id, root, title, suite, flow, boards, created, finished, outcomes, verdict from sessions"
        " where suite != '' and created >= ? and created < ? order by created desc, key desc limit ?",
        (span[-1] * NIGHT_SECONDS, (last + 1) * NIGHT_SECONDS, _SESSIONS),
    ).fetchall()
    counted = Counter((*_make_target(row), night_of(row["created"])) for row in rows)
    cells: dict[tuple[str, str, str], dict[int, NightCell]] = {}
    for row in rows:
        target, night = _make_target(row), night_of(row["created"])
        cells.setdefault(target, {}).setdefault(night, _make_cell(row, counted[(*target, night)]))
    found = [NightRow(*target, [by_night.get(night) for night in span]) for target, by_night in cells.items()]
    found.sort(key=_make_sort_key)
    return NightGrid([format_night(night) for night in span], found[:most], max(len(found) - most, 0))


def _make_target(row: sqlite3.Row) -> tuple[str, str, str]:
    return row["suite"], row["flow"], ", ".join(one for one in row["boards"].split(SEPARATOR) if one)


def _make_cell(row: sqlite3.Row, sessions: int) -> NightCell:
    kinds = Counter[str]()
    outcomes: Mapping[str, int] = json.loads(row["outcomes"] or "{}")
    for outcome, count in outcomes.items():
        kinds[classify_outcome(outcome)] += count
    counts = [(kind, kinds[kind]) for kind in KINDS if kinds[kind]]
    verdict = row["verdict"] or find_worst_kind(outcomes, finished=bool(row["finished"]))
    return NightCell(link_of(row["id"], row["root"]), row["title"], row["created"], verdict, counts, sessions)


def _make_sort_key(row: NightRow) -> tuple[int, str, str, str]:
    newest = row.newest
    rank = KINDS.index(newest.verdict) if newest is not None and newest.verdict in KINDS else len(KINDS)
    return rank, row.board, row.suite, row.flow

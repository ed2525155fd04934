"""The history of a case: its samples over all sessions that ran the same on the same board, and where they step."""

from __future__ import annotations

import itertools
import json
import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hil.controller.analysis.bench.stats import DEFAULT_EFFECT
from hil.controller.analysis.steps import Level, find_steps, levels
from hil.controller.web.addresses import Asked, link_of, reference_of
from hil.controller.web.index import SEPARATOR
from hil.controller.web.sessions import Session
from hil.controller.workloads.suites.reports.changes import ITERATIONS
from hil.controller.workloads.suites.reports.results import is_failing
from hil.errors import UsageError

Floats = npt.NDArray[np.float64]
# So many samples of a history are shown and judged, the newest.
MOST_SAMPLES = 2000
_LOG_MOST = 709.0
# Of each side of a change so many samples are compared: with three on the later one there are enough for an interval.
COMPARED = 5
# What tells one series of a case from another, and which of it is a column of the case.
IDENTITY = ("kind", "suite", "flow", "runtime", "board", "model")
_OF_CASE = ("flow", "runtime", "board", "model")


@dataclass(frozen=True)
class Measure:
    """A number whose history is shown."""

    column: str
    title: str
    is_log: bool  # whether it changes by factors
    least: float  # the smallest difference of levels that is told; of a logarithm where it changes by factors
    worse: int  # 1 where more is worse, -1 where less is


MEASURES: Mapping[str, Measure] = {
    "device": Measure("device_p50_ns", "device time", True, math.log1p(DEFAULT_EFFECT), 1),
    "host": Measure("host_s", "host time", True, math.log(1.2), 1),
    "compile": Measure("compile_s", "compile time", True, math.log(1.2), 1),
    "size": Measure("program_bytes", "program size", True, math.log(1.02), 1),
    "abs": Measure("max_abs", "largest error", True, math.log(2.0), 1),
    "sqnr": Measure("sqnr_db", "SQNR", False, 1.0, -1),
}
_OF_MOVER = {"device_p50_ns": "device", "artifact_bytes": "size", "max_abs": "abs", "sqnr_db": "sqnr"}


@dataclass(frozen=True)
class HistoryFilter(Asked):
    """Whose history, and of what: the query of the page's address. "" is any; of a case, its latest."""

    case: str = ""
    kind: str = ""
    suite: str = ""
    flow: str = ""
    runtime: str = ""
    board: str = ""
    model: str = ""
    place: str = ""  # of a suite: the folder that its models are of
    what: str = ""  # of MEASURES; "" is device time
    x: str = ""  # "" is by time, "session" one place a session, "commit", "compiler", or a package of the versions
    page: int = 1


@dataclass(frozen=True)
class Point:
    """A sample: a case in a session."""

    session: int
    id: str
    root: int
    created: float | None
    title: str
    branch: str
    commit: str
    compilers: str
    versions: Mapping[str, str]
    outcome: str  # regardless of what was expected
    message: str
    value: float | None
    iterations: int

    @property
    def link(self) -> str:
        """The query that names its session in addresses."""
        return link_of(self.id, self.root)

    @property
    def reference(self) -> str:
        """What names its session in a comparison's address."""
        return reference_of(self.id, self.root)

    @property
    def fails(self) -> bool:
        """Whether it needs attention."""
        return is_failing(self.outcome)


@dataclass(frozen=True)
class Step:
    """A change that was found: the first sample of a new level."""

    index: int
    before: float
    after: float
    worse: bool
    # befores, afters: the samples that are compared, next to it and on their levels, wild ones left out
    befores: Sequence[int] = ()
    afters: Sequence[int] = ()

    @property
    def ratio(self) -> float | None:
        """After by before; None where that is no number."""
        return self.after / self.before if self.before else None


@dataclass(frozen=True)
class Series:
    """Samples of one case that ran the same, in the order of time."""

    identity: Mapping[str, str]
    points: Sequence[Point]
    total: int  # of how many the points are the newest
    judged: Sequence[int]  # indices of the points whose value is judged
    levels: Sequence[Level]  # over the judged ones: their indices are places in ``judged``
    steps: Sequence[Step]  # indices of points
    flips: Sequence[int]  # indices of points that fail and whose predecessor did not

    def sides_of(self, step: Step) -> dict[str, list[str]]:
        """What names the sessions on both sides of a change in a comparison's address."""
        sides = {"a": step.befores, "b": step.afters}
        return {name: [self.points[index].reference for index in side] for name, side in sides.items()}


def history_query(session: Session, case: str, what: str = "") -> str:
    """The query of the history that a case of a session belongs to, as far as its session tells that."""
    asked = HistoryFilter(
        case=case,
        kind=session.kind,
        suite=session.suite,
        flow=session.flow,
        runtime=session.runtimes[0] if len(session.runtimes) == 1 else "",
        board=session.boards[0] if len(session.boards) == 1 else "",
        what=_OF_MOVER.get(what, what),
    )
    return asked.query()


def measure_of(asked: HistoryFilter) -> Measure:
    """The number that an address asks for. Raises UsageError: there is none of that name."""
    found = MEASURES.get(asked.what or "device")
    if found is None:
        raise UsageError(f"there is no history of {asked.what[:40]!r}", hint=f"one of {', '.join(MEASURES)}")
    return found


def identities(database: sqlite3.Connection, asked: HistoryFilter) -> list[tuple[Mapping[str, str], int]]:
    """The series of a case that a filter leaves, each with its number of samples, the latest first."""
    where, values = _where(asked)
    rows = database.execute(
        "select sessions.kind, sessions.suite, cases.flow, cases.runtime, cases.board, cases.model, count(*)"
        f" from cases join sessions on sessions.key = cases.session where {where}"
        " group by 1, 2, 3, 4, 5, 6 order by max(sessions.created) desc limit 100",
        values,
    ).fetchall()
    words: dict[int, str] = {}
    for key in {row[index] for row in rows for index in range(2, 6)}:
        words[key] = database.execute("select word from words where key = ?", (key,)).fetchone()[0]
    return [(dict(zip(IDENTITY, (*row[:2], *(words[key] for key in row[2:6])), strict=True)), row[6]) for row in rows]


def read_series(database: sqlite3.Connection, case: str, identity: Mapping[str, str], measure: Measure) -> Series:
    """One series of a case, judged."""
    where, values = _where(HistoryFilter(case=case), identity)
    rows = database.execute(
        "select sessions.key, sessions.id, sessions.root, sessions.created, sessions.title, sessions.branch,"
        " sessions.commit_id, sessions.compilers, sessions.versions,"
        " (select word from words where words.key = cases.outcome),"
        " (select word from words where words.key = cases.ended),"
        " (select word from words where words.key = cases.message),"
        f" cases.{measure.column}, cases.iterations, count(*) over ()"
        f" from cases join sessions on sessions.key = cases.session where {where}"
        " order by sessions.created desc, sessions.key desc limit ?",
        (*values, MOST_SAMPLES),
    ).fetchall()
    points = [_point(row) for row in reversed(rows)]
    total = rows[0][14] if rows else 0
    return judge(identity, points, total, measure)


def judge(identity: Mapping[str, str], points: Sequence[Point], total: int, measure: Measure) -> Series:
    """Find the levels and steps of samples, and where outcomes flipped."""
    values = np.array([math.nan if point.value is None else point.value for point in points], np.float64)
    iterations = np.array([point.iterations for point in points], np.int64)
    judged, found, steps = steps_of(values, iterations, measure)
    return Series(identity, points, total, judged, found, steps, flips_of(points))


def steps_of(
    values: Floats, iterations: npt.NDArray[np.int64], measure: Measure
) -> tuple[list[int], list[Level], list[Step]]:
    """The indices of the samples that are judged, and the levels and steps of these; NaN is no value.

    Device times of too few iterations, and what has no logarithm, are only shown.
    """
    counts = np.isfinite(values)
    if measure.is_log:
        counts &= values > 0
    if measure.column == "device_p50_ns":
        counts &= iterations >= ITERATIONS
    judged = np.flatnonzero(counts).tolist()
    numbers = np.log(values[counts]) if measure.is_log else values[counts]
    found = levels(numbers, find_steps(numbers, least=measure.least))
    on_level = [[judged[index] for index in _members(numbers, one, measure.least)] for one in found]
    if measure.is_log:
        found = [replace(one, median=_power(one.median), low=_power(one.low), high=_power(one.high)) for one in found]
    steps = []
    for (was, befores), (now, afters) in itertools.pairwise(zip(found, on_level, strict=True)):
        worse = (now.median - was.median) * measure.worse > 0
        first = judged[now.start]
        others = [one for one in afters[:COMPARED] if one != first]
        steps.append(Step(first, was.median, now.median, worse, befores[-COMPARED:], [first, *others][:COMPARED]))
    return judged, found, steps


def _members(numbers: Floats, level: Level, least: float) -> list[int]:
    """The indices of a level's measurements without those that are off it."""
    off = np.abs(numbers[level.start : level.end] - level.median)
    on_it = off <= max(level.high - level.median, least)
    return (level.start + (np.flatnonzero(on_it) if on_it.any() else np.arange(off.size))).tolist()


def _power(exponent: float) -> float:
    """e to a power, and the largest float where that is larger than any."""
    return math.exp(min(exponent, _LOG_MOST))


def flips_of(points: Sequence[Point]) -> list[int]:
    """The indices of samples that fail where the one before, skips left out, did not."""
    told = np.array([point.outcome not in ("SKIP", "") for point in points], np.bool_)
    return flips_among(told, np.array([point.fails for point in points], np.bool_))


def flips_among(told: npt.NDArray[np.bool_], fails: npt.NDArray[np.bool_]) -> list[int]:
    """The indices of samples that fail where the one before did not, among those that tell something."""
    places = np.flatnonzero(told)
    failing = fails[places]
    return [int(place) for place in places[1:][failing[1:] & ~failing[:-1]]]


def _point(row: Sequence[Any]) -> Point:
    compilers = ", ".join(one for one in (row[7] or "").split(SEPARATOR) if one)
    try:
        versions = json.loads(row[8] or "{}")
    except ValueError:
        versions = {}
    return Point(
        session=row[0],
        id=row[1],
        root=row[2],
        created=row[3],
        title=row[4],
        branch=row[5] or "",
        commit=row[6] or "",
        compilers=compilers,
        versions=versions,
        outcome=row[10] or row[9],
        message=row[11],
        value=row[12],
        iterations=row[13] or 0,
    )


def _where(asked: HistoryFilter, identity: Mapping[str, str] | None = None) -> tuple[str, list[Any]]:
    """A condition on cases joined with sessions; an identity's empty texts are asked for, a filter's are not."""
    parts = ["cases.name = (select key from words where word = ?)"]
    values: list[Any] = [asked.case]
    for name in IDENTITY:
        value = identity[name] if identity is not None else getattr(asked, name)
        if not value and identity is None:
            continue
        if name in _OF_CASE:
            parts.append(f"cases.{name} = (select key from words where word = ?)")
        else:
            parts.append(f"sessions.{name} = ?")
        values.append(value)
    return " and ".join(parts), values

"""History of a case: samples from all sessions with the same configuration and board, and the steps in the samples."""

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

from hil.controller.analysis.steps import Level, find_levels, find_steps
from hil.controller.devices.measuring.time_statistics import DEFAULT_EFFECT
from hil.controller.storage.outcomes import is_failing
from hil.controller.web.index.index import SEPARATOR
from hil.controller.web.index.sessions import IndexedSession
from hil.controller.web.text.addresses import PageQuery, format_reference, link_of
from hil.controller.web.text.parameters import InvalidParameter
from hil.controller.workloads.suites.reports.changes import ITERATIONS
from hil.core.results import BOARD_OUTCOMES

Floats = npt.NDArray[np.float64]
# Maximum samples to show and judge, newest first.
MAX_SAMPLES = 2000
_MAX_LOG = 709.0
# Number of samples to compare on each side of a change. Three later samples are enough for an interval.
COMPARED = 5
# Fields that identify a series, and the fields among them that are columns in the table ``cases``.
IDENTITY = ("kind", "suite", "flow", "runtime", "board", "model")
_OF_CASE = ("flow", "runtime", "board", "model")
_NO_BOARD = "cases.board = (select key from words where word = '')"
# Condition for cases that failed before they reached a board. A lost board gives no information about the case.
_LOST = ", ".join(sorted(f"'{outcome.value}'" for outcome in BOARD_OUTCOMES))
FAILED_EARLY = f"{_NO_BOARD} and cases.outcome not in (select key from words where word in ({_LOST}))"


@dataclass(frozen=True)
class HistoryMeasure:
    """Number with a history."""

    column: str
    title: str
    is_log: bool  # True if the number changes by factors
    least: float  # smallest difference between levels to report; a logarithm if ``is_log``
    worse: int  # 1 if larger is worse, -1 if smaller is worse


MEASURES: Mapping[str, HistoryMeasure] = {
    "device": HistoryMeasure("device_p50_ns", "device time", True, math.log1p(DEFAULT_EFFECT), 1),
    "host": HistoryMeasure("host_s", "host time", True, math.log(1.2), 1),
    "compile": HistoryMeasure("compile_s", "compile time", True, math.log(1.2), 1),
    "size": HistoryMeasure("program_bytes", "program size", True, math.log(1.02), 1),
    "energy": HistoryMeasure("joules", "energy of an inference", True, math.log1p(DEFAULT_EFFECT), 1),
    "abs": HistoryMeasure("max_abs", "largest error", True, math.log(2.0), 1),
    "sqnr": HistoryMeasure("sqnr_db", "SQNR", False, 1.0, -1),
}
_OF_MOVER = {
    "device_p50_ns": "device",
    "artifact_bytes": "size",
    "joules": "energy",
    "max_abs": "abs",
    "sqnr_db": "sqnr",
}


@dataclass(frozen=True)
class HistoryFilter(PageQuery):
    """Query parameters of a history. "" matches all series. For a case, "" selects the latest series."""

    case: str = ""
    kind: str = ""
    suite: str = ""
    flow: str = ""
    runtime: str = ""
    board: str = ""
    model: str = ""
    place: str = ""  # for a suite: directory of the models
    what: str = ""  # a key of MEASURES; "" is device time
    x: str = ""  # x axis: "" (time), "session", "commit", "compiler", or a package name
    page: int = 1


@dataclass(frozen=True)
class Point:
    """Sample of a case in a session."""

    session: int
    id: str
    root: int
    created: float | None
    title: str
    branch: str
    commit: str
    compilers: str
    versions: Mapping[str, str]
    outcome: str  # before expectations are applied
    message: str
    value: float | None
    iterations: int
    grade: str  # of the times; "" without a grade
    comparable: int  # iterations of a time that can be compared, 0 for grade F
    stack: Mapping[str, str] | None = None  # part of the board's stack -> version; None without a stack

    @property
    def link(self) -> str:
        """Query of the session."""
        return link_of(self.id, self.root)

    @property
    def reference(self) -> str:
        """Session reference for a comparison URL."""
        return format_reference(self.id, self.root)

    @property
    def fails(self) -> bool:
        """True if the outcome is a failure."""
        return is_failing(self.outcome)


@dataclass(frozen=True)
class LevelStep:
    """Detected change, at the first sample of a new level."""

    index: int
    before: float
    after: float
    worse: bool
    # befores, afters: samples to compare, near the step and without outliers
    befores: Sequence[int] = ()
    afters: Sequence[int] = ()

    @property
    def ratio(self) -> float | None:
        """Ratio after / before, or None if undefined."""
        return self.after / self.before if self.before else None


@dataclass(frozen=True)
class Series:
    """Samples of a case with the same configuration, in time order."""

    identity: Mapping[str, str]
    points: Sequence[Point]
    total: int  # number of samples, including those older than ``points``
    judged: Sequence[int]  # indices of the judged points
    levels: Sequence[Level]  # levels with indices into ``judged``
    steps: Sequence[LevelStep]  # steps with indices into ``points``
    flips: Sequence[int]  # indices of points that fail although the previous point did not

    def sides_of(self, step: LevelStep) -> dict[str, list[str]]:
        """Return the session references on both sides of a step, for a comparison URL."""
        sides = {"a": step.befores, "b": step.afters}
        return {name: [self.points[index].reference for index in side] for name, side in sides.items()}


def make_history_query(session: IndexedSession, case: str, what: str = "") -> str:
    """Return the query for a case's history, with all fields that the session determines."""
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


def measure_of(asked: HistoryFilter) -> HistoryMeasure:
    """Return the requested measure. Raises UsageError if the measure is unknown."""
    found = MEASURES.get(asked.what or "device")
    if found is None:
        raise InvalidParameter.choose("history measure", asked.what, MEASURES)
    return found


def list_identities(database: sqlite3.Connection, asked: HistoryFilter) -> list[tuple[Mapping[str, str], int]]:
    """Return the matching series of a case with their numbers of samples, latest first. Series of boards are first."""
    where, values = _build_condition(asked)
    rows = database.execute(
        "select sessions.kind, sessions.suite, cases.flow, cases.runtime, cases.board, cases.model, count(*)"
        f" from cases join sessions on sessions.key = cases.session where {where}"
        f" group by 1, 2, 3, 4, 5, 6 order by {_NO_BOARD}, max(sessions.created) desc limit 100",
        values,
    ).fetchall()
    words: dict[int, str] = {}
    for key in {row[index] for row in rows for index in range(2, 6)}:
        words[key] = database.execute("select word from words where key = ?", (key,)).fetchone()[0]
    return [(dict(zip(IDENTITY, (*row[:2], *(words[key] for key in row[2:6])), strict=True)), row[6]) for row in rows]


def read_series(
    database: sqlite3.Connection, case: str, identity: Mapping[str, str], measure: HistoryMeasure
) -> Series:
    """Read the samples of a case over time, and detect changes."""
    where, values = _build_condition(HistoryFilter(case=case), identity)
    rows = database.execute(
        "select sessions.key, sessions.id, sessions.root, sessions.created, sessions.title, sessions.branch,"
        " sessions.commit_id, sessions.compilers, sessions.versions,"
        " (select word from words where words.key = cases.outcome),"
        " (select word from words where words.key = cases.ended),"
        " (select word from words where words.key = cases.message),"
        f" cases.{measure.column}, cases.iterations, cases.comparable,"
        " (select word from words where words.key = cases.grade), count(*) over (), sessions.stack"
        f" from cases join sessions on sessions.key = cases.session where {where}"
        " order by sessions.created desc, sessions.key desc limit ?",
        (*values, MAX_SAMPLES),
    ).fetchall()
    points = [_make_point(row) for row in reversed(rows)]
    total = rows[0][16] if rows else 0
    return judge(identity, points, total, measure)


def judge(identity: Mapping[str, str], points: Sequence[Point], total: int, measure: HistoryMeasure) -> Series:
    """Find levels, steps and outcome changes in samples."""
    values = np.array([math.nan if point.value is None else point.value for point in points], np.float64)
    if points and points[-1].stack is not None:
        # Samples without a stack are not compared with the newest sample.
        values[[point.stack is None for point in points]] = math.nan
    iterations = np.array([point.comparable for point in points], np.int64)
    judged, found, steps = find_series_steps(values, iterations, measure)
    return Series(identity, points, total, judged, found, steps, find_flips(points))


def find_series_steps(
    values: Floats, iterations: npt.NDArray[np.int64], measure: HistoryMeasure
) -> tuple[list[int], list[Level], list[LevelStep]]:
    """Return the indices of judged samples, their levels, and their steps. NaN is a missing value.

    Device times with too few iterations, and values without a logarithm, are not judged. ``iterations`` is 0 for times
    with grade F.
    """
    counts = np.isfinite(values)
    if measure.is_log:
        counts &= values > 0
    if measure.column == "device_p50_ns":
        counts &= iterations >= ITERATIONS
    judged = np.flatnonzero(counts).tolist()
    numbers = np.log(values[counts]) if measure.is_log else values[counts]
    found = find_levels(numbers, find_steps(numbers, least=measure.least))
    on_level = [[judged[index] for index in _find_members(numbers, one, measure.least)] for one in found]
    if measure.is_log:
        found = [
            replace(one, median=_limit_exp(one.median), low=_limit_exp(one.low), high=_limit_exp(one.high))
            for one in found
        ]
    steps = []
    for (was, befores), (now, afters) in itertools.pairwise(zip(found, on_level, strict=True)):
        worse = (now.median - was.median) * measure.worse > 0
        first = judged[now.start]
        others = [one for one in afters[:COMPARED] if one != first]
        steps.append(LevelStep(first, was.median, now.median, worse, befores[-COMPARED:], [first, *others][:COMPARED]))
    return judged, found, steps


def _find_members(numbers: Floats, level: Level, least: float) -> list[int]:
    """Return the indices of a level's samples without outliers."""
    off = np.abs(numbers[level.start : level.end] - level.median)
    on_it = off <= max(level.high - level.median, least)
    return (level.start + (np.flatnonzero(on_it) if on_it.any() else np.arange(off.size))).tolist()


def _limit_exp(exponent: float) -> float:
    """Return e to a power, limited to the largest float."""
    return math.exp(min(exponent, _MAX_LOG))


def find_flips(points: Sequence[Point]) -> list[int]:
    """Return the indices of samples that fail although the previous sample did not. Skipped samples are ignored."""
    told = np.array([point.outcome not in ("SKIP", "") for point in points], np.bool_)
    return find_flips_among(told, np.array([point.fails for point in points], np.bool_))


def find_flips_among(told: npt.NDArray[np.bool_], fails: npt.NDArray[np.bool_]) -> list[int]:
    """Return the indices of samples that fail although the previous sample did not.

    Only samples in the mask ``told`` count.
    """
    places = np.flatnonzero(told)
    failing = fails[places]
    return [int(place) for place in places[1:][failing[1:] & ~failing[:-1]]]


def _parse_stack(text: str | None) -> dict[str, str] | None:
    try:
        return json.loads(text) if text else None
    except ValueError:
        return None


def _make_point(row: Sequence[Any]) -> Point:
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
        comparable=row[14] or 0,
        grade=row[15] or "",
        stack=_parse_stack(row[17]),
    )


def _build_condition(asked: HistoryFilter, identity: Mapping[str, str] | None = None) -> tuple[str, list[Any]]:
    """Return an SQL condition. An empty identity value matches only empty values. An empty filter value matches all.

    The board of an identity also matches cases that failed before they reached a board, in sessions with this board.
    """
    parts = ["cases.name = (select key from words where word = ?)"]
    values: list[Any] = [asked.case]
    for name in IDENTITY:
        value = identity[name] if identity is not None else getattr(asked, name)
        if not value and identity is None:
            continue
        if name == "board" and value and identity is not None:
            is_early = f"{FAILED_EARLY} and instr(sessions.boards, ?)"
            parts.append(f"(cases.board = (select key from words where word = ?) or {is_early})")
            values.append(value)
            value = f"{SEPARATOR}{value}{SEPARATOR}"
        elif name in _OF_CASE:
            parts.append(f"cases.{name} = (select key from words where word = ?)")
        else:
            parts.append(f"sessions.{name} = ?")
        values.append(value)
    return " and ".join(parts), values

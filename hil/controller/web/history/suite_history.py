"""History of a suite: pass rate and total device time per session."""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hil.controller.analysis.steps import Level, find_levels, find_steps
from hil.controller.devices.measuring.time_statistics import DEFAULT_EFFECT
from hil.controller.storage.outcomes import classify_outcome
from hil.controller.web.index.index import SEPARATOR
from hil.controller.web.index.sessions import IndexedSession, list_sessions_where

MAX_SESSIONS = 1000
# Smallest reported step of the pass rate, in percent.
_MIN_RATE = 0.5


def list_suites(database: sqlite3.Connection, most: int) -> list[sqlite3.Row]:
    """Return the suites in the index per flow and set of boards, latest first."""
    return database.execute(
        "select suite, flow, boards, count(*) as count, max(created) as last from sessions where suite != ''"
        " group by suite, flow, boards order by last desc limit ?",
        (most,),
    ).fetchall()


@dataclass(frozen=True)
class SuiteSample:
    """Session of a suite."""

    session: IndexedSession
    passed: int
    judged: int  # number of cases except skipped cases and expected failures
    device_ns: float | None  # sum over cases; None if an unusual number of cases was timed

    @property
    def rate(self) -> float | None:
        """Pass rate in percent."""
        return 100 * self.passed / self.judged if self.judged else None


@dataclass(frozen=True)
class SuiteHistory:
    """Sessions of a suite in time order."""

    samples: Sequence[SuiteSample]
    total: int  # number of sessions, including those older than ``samples``
    usual_cases: int  # most common number of timed cases per session
    rate: JudgedValues
    device: JudgedValues

    @property
    def boards(self) -> list[str]:
        """Boards of the sessions."""
        return sorted({name for one in self.samples for name in one.session.boards})

    @property
    def mixes_boards(self) -> bool:
        """Whether the sessions ran on different boards, so that their device times are not comparable."""
        return len({tuple(one.session.boards) for one in self.samples}) > 1

    @property
    def places(self) -> list[str]:
        """Directories of the suite's models. Suites in different directories can have the same name."""
        return sorted({one.session.place for one in self.samples} - {""})


@dataclass(frozen=True)
class JudgedValues:
    """Series of numbers with levels."""

    values: Sequence[float | None]
    judged: Sequence[int]  # indices of the judged values
    levels: Sequence[Level]  # levels with indices into ``judged``
    steps: Sequence[int]  # indices of values that start a new level


def read_suite(
    database: sqlite3.Connection, suite: str, flow: str = "", board: str = "", runtime: str = "", place: str = ""
) -> SuiteHistory:
    """Read the history of a suite. Empty filters match all."""
    parts, values = ["suite = ?", "cases > 0"], list[Any]([suite])
    if flow:
        parts.append("flow = ?")
        values.append(flow)
    if place:
        parts.append("place = ?")
        values.append(place)
    for column, name in (("boards", board), ("runtimes", runtime)):
        if name:
            parts.append(f"instr({column}, ?)")
            values.append(f"{SEPARATOR}{name}{SEPARATOR}")
    where = " and ".join(parts)
    total = int(database.execute(f"select count(*) from sessions where {where}", values).fetchone()[0])
    found = list_sessions_where(database, f"{where} order by created desc, key desc limit ?", (*values, MAX_SESSIONS))
    return suite_history(list(reversed(found)), total, one_board=bool(board))


def suite_history(sessions: Sequence[IndexedSession], total: int, *, one_board: bool = False) -> SuiteHistory:
    """Build the history from sessions in time order.

    Device times of different boards are not comparable, so they get no levels and no changes.

    Args:
        one_board: all sessions have the requested board, possibly with others.
    """
    is_comparable = one_board or len({tuple(one.boards) for one in sessions}) < 2
    counted = Counter(one.device_cases for one in sessions if one.device_ns)
    usual = counted.most_common(1)[0][0] if counted else 0
    samples = []
    for one in sessions:
        kinds = Counter[str]()
        for outcome, count in one.outcomes.items():
            kinds[classify_outcome(outcome)] += count
        time = one.device_ns if one.device_ns and one.device_cases == usual else None
        samples.append(SuiteSample(one, kinds["pass"], kinds.total() - kinds["quiet"], time))
    return SuiteHistory(
        samples,
        total,
        usual,
        judge_values([one.rate for one in samples], least=_MIN_RATE),
        judge_values(
            [one.device_ns if is_comparable else None for one in samples], least=DEFAULT_EFFECT, relative=True
        ),
    )


def judge_values(values: Sequence[float | None], *, least: float, relative: bool = False) -> JudgedValues:
    """Find the levels in a series. ``least`` is the smallest step to report; if ``relative``, a factor minus 1."""
    judged = [index for index, value in enumerate(values) if value is not None and (value > 0 or not relative)]
    numbers = np.array([values[index] for index in judged], np.float64)
    cuts = find_steps(np.log(numbers), least=math.log1p(least)) if relative else find_steps(numbers, least=least)
    return JudgedValues(values, judged, find_levels(numbers, cuts), [judged[cut] for cut in cuts])

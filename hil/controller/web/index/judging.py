"""Judge the histories of cases, and store since which session a case fails or is slower.

After indexing, the indexer judges changed histories in small batches, with the history page's rules
(:mod:`hil.controller.web.index.series`). A new sample affects only the history of the case on this board, not on other
boards.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hil.controller.storage.outcomes import is_failing
from hil.controller.web.index.index import SEPARATOR
from hil.controller.web.index.series import FAILED_EARLY, MAX_SAMPLES, MEASURES, find_flips_among, find_series_steps

BROKE, SLOWER = "broke", "slower"
# Seconds per batch. Between batches, the indexer reads new sessions.
_JUDGE_SECONDS = 0.3
_SAMPLE = np.dtype(
    [
        *((name, np.int64) for name in ("session", "flow", "runtime", "model", "outcome", "ended", "comparable")),
        ("device_p50_ns", np.float64),
    ]
)
_COLUMNS = ", ".join(_SAMPLE.names or ())
_SELECT = f"select {_COLUMNS} from cases where name = ? and board = ?"
_SELECT_EARLY = f"select {_COLUMNS} from cases where name = ? and {FAILED_EARLY}"
Samples = npt.NDArray[np.void]
Sides = tuple[Sequence[int], Sequence[int]]
Mask = npt.NDArray[np.bool_]


def judge_some(database: sqlite3.Connection) -> bool:
    """Judge a batch of changed histories. Return False if there were none."""
    end = time.monotonic() + _JUDGE_SECONDS
    changed = database.execute("select name, board from unjudged limit 1000").fetchall()
    if not changed:
        return False
    judge = _Judge(database)
    for name, board in changed:
        judge.judge(name, board)
        if time.monotonic() > end:
            break
    return True


class _Judge:
    """Judge of the histories in an index. Sessions must not change in the meantime."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        sessions = database.execute(
            "select key, created, kind, suite, boards from sessions order by created, key"
        ).fetchall()
        self._created = [row[1] for row in sessions]
        kinds: dict[tuple[str, str], int] = {}
        self._kind = np.array([kinds.setdefault(row[2:4], len(kinds)) for row in sessions], np.int64)
        self._boards = {row[0]: row[4] for row in sessions}
        # Session key -> position in time order.
        self._place = np.full(1 + max((row[0] for row in sessions), default=0), -1)
        self._place[[row[0] for row in sessions]] = np.arange(len(sessions))
        # Outcome -> (is a result, is a failure).
        self._words: dict[int, tuple[bool, bool]] = {}
        nothing = database.execute("select key from words where word = ''").fetchone()
        self._nothing = nothing[0] if nothing else -1

    def judge(self, name: int, board: int) -> None:
        """Judge a case's histories on a board."""
        samples = np.fromiter(
            (*self._database.execute(_SELECT, (name, board)), *self._list_early(name, board)), _SAMPLE
        )
        self._database.execute("delete from changes where name = ? and board = ?", (name, board))
        if samples.size > 1:
            for history in self._split_histories(samples):
                found = [*self._find_breaks(history), *self._find_slowdowns(history)]
                if found:
                    self._database.executemany(_INSERT, [(name, board, *one) for one in found])
        self._database.execute("delete from unjudged where name = ? and board = ?", (name, board))

    def _list_early(self, name: int, board: int) -> Sequence[Any]:
        """Return the samples that failed before they reached a board, in sessions with this board."""
        found = self._database.execute(_SELECT_EARLY, (name,)).fetchall() if board != self._nothing else ()
        if not found:
            return ()
        word = self._database.execute("select word from words where key = ?", (board,)).fetchone()[0]
        return [row for row in found if f"{SEPARATOR}{word}{SEPARATOR}" in (self._boards.get(row[0]) or "")]

    def _split_histories(self, samples: Samples) -> Iterator[Samples]:
        """Split samples by configuration (session kind, suite, flow, runtime, model), in time order."""
        samples = samples[self._place[samples["session"]] >= 0]
        samples = samples[np.argsort(self._place[samples["session"]])]
        same = (self._kind[self._place[samples["session"]]], *(samples[name] for name in ("flow", "runtime", "model")))
        if all((column == column[0]).all() for column in same):
            yield samples[-MAX_SAMPLES:]
            return
        _, which = np.unique(np.stack(same), axis=1, return_inverse=True)
        for number in range(which.max() + 1):
            yield samples[which.reshape(-1) == number][-MAX_SAMPLES:]

    def _find_breaks(self, history: Samples) -> Iterator[tuple[Any, ...]]:
        ended = np.where(history["ended"] == self._nothing, history["outcome"], history["ended"])
        told, fails = self._mask_outcomes(ended)
        places = np.flatnonzero(told)
        over = bool(places.size) and not fails[places[-1]]
        for flip in find_flips_among(told, fails):
            earlier = places[np.searchsorted(places, flip) - 1]
            yield self._make_change_row(history, BROKE, ([earlier], [flip]), None, None, over)

    def _find_slowdowns(self, history: Samples) -> Iterator[tuple[Any, ...]]:
        _, levels, steps = find_series_steps(history["device_p50_ns"], history["comparable"], MEASURES["device"])
        for step in steps:
            if step.worse:
                # The change is over if the last level is closer to the level before the change than to the slow level.
                over = levels[-1].median ** 2 < step.before * step.after
                yield self._make_change_row(history, SLOWER, (step.befores, step.afters), step.before, step.after, over)

    def _make_change_row(self, history: Samples, what: str, sides: Sides, before: Any, after: Any, over: bool) -> Any:
        """Return a row for a change. Both lists of samples are in time order."""
        was, now = (history["session"][list(side)].tolist() for side in sides)
        compared = json.dumps([was, now])
        return now[0], what, was[-1], before, after, self._created[self._place[now[0]]], over, compared

    def _mask_outcomes(self, ended: npt.NDArray[np.int64]) -> tuple[Mask, Mask]:
        """Return two masks for outcomes: is a result, is a failure."""
        found, which = np.unique(ended, return_inverse=True)
        for key in map(int, found):
            if key not in self._words:
                word = self._database.execute("select word from words where key = ?", (key,)).fetchone()[0]
                self._words[key] = (word not in ("SKIP", ""), is_failing(word))
        told, fails = np.array([self._words[int(key)] for key in found], np.bool_).T
        return told[which], fails[which]


_INSERT = (
    "insert or replace into changes (name, board, session, what, earlier, before, after, created, over, compared)"
    " values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)

"""Cases of a session as numeric columns, cached for later comparisons.

Columns contain the keys of texts in the index's table ``words`` (:class:`WordLookup`).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hil.controller.web.files.cached import Results
from hil.controller.web.index.sessions import IndexedSession

Columns = npt.NDArray[np.void]
Keys = npt.NDArray[np.int64]

_TYPE = np.dtype(
    [
        *((name, np.int32) for name in ("name", "number", "outcome", "ended", "message", "output")),
        *((name, np.int64) for name in ("program", "comparable")),
        # NaN means None, because the index never stores NaN.
        *((name, np.float64) for name in ("device_p50_ns", "device_p90_ns", "program_bytes", "joules")),
        *((name, np.float64) for name in ("max_abs", "sqnr_db")),
    ]
)
_OUTPUT = np.dtype([("name", np.int32), ("output", np.int32), ("max_abs", np.float64), ("sqnr_db", np.float64)])
NO_OUTPUTS = np.empty(0, _OUTPUT)
# Maximum outputs to compare, for cases with multiple outputs.
MAX_OUTPUTS = 1_000_000
# A million cases need 88 MB, so the cache holds 6 sessions with 50,000 cases, or 600 sessions with 500 cases.
RESULTS = Results(24 << 20, at_once=2)


def read_columns(database: sqlite3.Connection, session: IndexedSession, only: Mapping[str, str]) -> Columns:
    """Return the cases of a session in order. ``only`` filters by column values."""
    return _read_cached(database, session, lambda: _read_cases(database, session.key, only), *only.items())


def read_outputs(database: sqlite3.Connection, session: IndexedSession) -> Columns:
    """Return the outputs of cases with multiple outputs."""
    return _read_cached(database, session, lambda: _read_outputs(database, session.key), "outputs")


def _read_cached(
    database: sqlite3.Connection, session: IndexedSession, read: Callable[[], Columns], *what: object
) -> Columns:
    """Return cached columns. The key contains the session's stamp, so that a changed session is read again."""
    found = database.execute(
        "select stamp, read_bytes, cases, (select seed from made) from sessions where key = ?", (session.key,)
    ).fetchone()

    def make() -> tuple[Columns, int]:
        made = read()
        return made, made.nbytes

    return RESULTS.get((session.key, *(found or ()), *what), make)


def _read_cases(database: sqlite3.Connection, session: int, only: Mapping[str, str]) -> Columns:
    where = "".join(f" and {name} = (select key from words where word = ?)" for name in only)
    cursor = database.cursor()
    cursor.row_factory = None
    rows = cursor.execute(f"select {', '.join(_NAMES)} from cases where session = ?{where}", (session, *only.values()))
    found = np.fromiter(rows, _TYPE, -1)
    return found[np.argsort(found["number"], kind="stable")]


def _read_outputs(database: sqlite3.Connection, session: int) -> Columns:
    cursor = database.cursor()
    cursor.row_factory = None
    rows = cursor.execute(
        "select outputs.name, outputs.output, outputs.max_abs, outputs.sqnr_db from outputs join cases"
        " using (session, name, number) where outputs.session = ? limit ?",
        (session, MAX_OUTPUTS + 1),
    )
    return np.fromiter(rows, _OUTPUT, -1)


_NAMES = _TYPE.names or ()


class WordLookup:
    """Texts of an index by key, read on demand. Negative keys are texts that are not in the index."""

    def __init__(self, database: sqlite3.Connection, others: Mapping[int, str]) -> None:
        self._database = database
        self._known = dict(others)

    def get_texts(self, keys: Iterable[Any]) -> list[str]:
        """Return the texts for keys."""
        asked = [int(key) for key in keys]
        missing = {key for key in asked if key not in self._known}
        if missing:
            rows = self._database.execute(
                "select key, word from words where key in (select value from json_each(?))", (json.dumps([*missing]),)
            )
            self._known.update((row[0], row[1]) for row in rows)
        return [self._known.get(key, "") for key in asked]

    def keys(self, texts: Iterable[str]) -> Keys:
        """Return the keys of the texts that are in the index."""
        rows = self._database.execute(
            "select key from words where word in (select value from json_each(?))", (json.dumps([*texts]),)
        )
        return np.fromiter((row[0] for row in rows), np.int64, -1)

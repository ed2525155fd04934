"""The cases of a session as columns of numbers, kept for whoever compares the session again.

Texts are the keys of the index' words (:class:`Words`).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hil.controller.web.cached import Results
from hil.controller.web.sessions import Session

Columns = npt.NDArray[np.void]
Keys = npt.NDArray[np.int64]

_TYPE = np.dtype(
    [
        *((name, np.int32) for name in ("name", "number", "outcome", "ended", "message", "output")),
        *((name, np.int64) for name in ("program", "iterations")),
        # None is NaN, which the index does not hold.
        *((name, np.float64) for name in ("device_p50_ns", "device_p90_ns", "program_bytes", "max_abs", "sqnr_db")),
    ]
)
_OUTPUT = np.dtype([("name", np.int32), ("output", np.int32), ("max_abs", np.float64), ("sqnr_db", np.float64)])
NO_OUTPUTS = np.empty(0, _OUTPUT)
# So many outputs of cases with several are compared.
MOST_OUTPUTS = 1_000_000
# Of a million cases these are 80 MB: those of six sessions of 50,000 are kept, or of 600 of 500.
RESULTS = Results(24 << 20, at_once=2)


def columns_of(database: sqlite3.Connection, session: Session, only: Mapping[str, str]) -> Columns:
    """The cases of a session in their order, or those of them whose texts are these."""
    return _kept(database, session, lambda: _read(database, session.key, only), *only.items())


def outputs_of(database: sqlite3.Connection, session: Session) -> Columns:
    """The outputs of a session's cases, of those that have several."""
    return _kept(database, session, lambda: _read_outputs(database, session.key), "outputs")


def _kept(database: sqlite3.Connection, session: Session, read: Callable[[], Columns], *what: object) -> Columns:
    """Columns of a session as they are now."""
    found = database.execute(
        "select stamp, read_bytes, cases, (select seed from made) from sessions where key = ?", (session.key,)
    ).fetchone()

    def make() -> tuple[Columns, int]:
        made = read()
        return made, made.nbytes

    return RESULTS.get((session.key, *(found or ()), *what), make)


def _read(database: sqlite3.Connection, session: int, only: Mapping[str, str]) -> Columns:
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
        (session, MOST_OUTPUTS + 1),
    )
    return np.fromiter(rows, _OUTPUT, -1)


_NAMES = _TYPE.names or ()


class Words:
    """The texts of an index by their keys, read where they are asked for; a key below 0 is a text that it lacks."""

    def __init__(self, database: sqlite3.Connection, others: Mapping[int, str]) -> None:
        self._database = database
        self._known = dict(others)

    def of(self, keys: Iterable[Any]) -> list[str]:
        """The texts of keys."""
        asked = [int(key) for key in keys]
        missing = {key for key in asked if key not in self._known}
        if missing:
            rows = self._database.execute(
                "select key, word from words where key in (select value from json_each(?))", (json.dumps([*missing]),)
            )
            self._known.update((row[0], row[1]) for row in rows)
        return [self._known.get(key, "") for key in asked]

    def keys(self, texts: Iterable[str]) -> Keys:
        """The keys of those texts that are in the index."""
        rows = self._database.execute(
            "select key from words where word in (select value from json_each(?))", (json.dumps([*texts]),)
        )
        return np.fromiter((row[0] for row in rows), np.int64, -1)

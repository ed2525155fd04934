"""Database of a history: SQLite in a directory, or PostgreSQL.

Both databases have the same tables and run the same SQL. The SQL uses ``?`` for values, and only functions that both
databases have. :class:`HistoryDatabase` has the parts that differ.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from hil.controller.storage.history.place import HistoryPlace

# Increase the number when tables change.
VERSION = 1
# Maximum wait for another writer. A writer has the lock for milliseconds, or while it deletes programs. Programs are
# copied without the lock.
WAIT_S = 60.0
# Maximum size of a value: a damaged or untrusted history must not fill the memory.
MAX_VALUE_BYTES = 1 << 20
_TABLES = (
    "CREATE TABLE series (id {text} primary key, key {json} not null){options}",
    "CREATE TABLE entries (run {text}, case_name {text}, series {text} not null, created {real} not null,"
    " commit_id {text} not null, branch {text} not null, program {text} not null, outcome {text} not null,"
    " p50_ns {real}, document {json} not null, samples {blob} not null, confirmed {text} not null,"
    " primary key (run, case_name))",
    "CREATE INDEX entries_by_series on entries (series, created)",
    "CREATE INDEX entries_by_commit on entries (commit_id)",
    "CREATE TABLE annotations (number {serial} primary key, commit_id {text} not null, run {text} not null,"
    " case_name {text} not null, created {real} not null, text {text} not null)",
)


class Rows(Protocol):
    """Result of a statement."""

    @property
    def rowcount(self) -> int:
        """Number of changed rows."""

    def fetchone(self) -> Any:
        """Return the next row, or None."""

    def fetchall(self) -> list[Any]:
        """Return all rows."""

    def __iter__(self) -> Iterator[Any]: ...


class HistoryDatabase(ABC):
    """Open database of a history. Use :meth:`execute` and :meth:`writing` only inside :meth:`errors`."""

    def __init__(self, place: HistoryPlace) -> None:
        self.place = place

    @abstractmethod
    def execute(self, text: str, values: Sequence[Any] = ()) -> Rows:
        """Run a statement and return its rows."""

    @abstractmethod
    def stream(self, text: str, values: Sequence[Any] = ()) -> Iterator[Any]:
        """Yield the rows of a query, without all rows in memory."""

    @abstractmethod
    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Hold the write lock for a transaction. Commit at the end, and roll back after an error."""

    @abstractmethod
    def errors(self) -> contextlib.AbstractContextManager[None]:
        """Convert errors of the database to StorageError."""

    @abstractmethod
    def bound_column(self, column: str) -> str:
        """Return an SQL expression for a column with bytes.

        If the value is too large, the expression is null and reads only the length.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""


def list_tables(**types: str) -> list[str]:
    """Return the statements that create the tables, with a database's names of types."""
    return [text.format(**types) for text in _TABLES]

"""History in SQLite: open and check the file, and report its errors."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

from hil.controller.storage.history.database import (
    MAX_VALUE_BYTES,
    VERSION,
    WAIT_S,
    HistoryDatabase,
    Rows,
    list_tables,
)
from hil.controller.storage.history.place import FILE, HistoryPlace
from hil.core.storage_errors import convert_os_errors
from hil.errors import StorageError

# Application id "hilH", which marks the file as a history of hil.
_APPLICATION = 0x68696C48
_TABLES = list_tables(text="text", json="text", blob="blob", real="real", serial="integer", options=" without rowid")


class SqliteDatabase(HistoryDatabase):
    """SQLite database of a history."""

    def __init__(self, place: HistoryPlace, connection: sqlite3.Connection) -> None:
        super().__init__(place)
        self._connection = connection

    def execute(self, text: str, values: Sequence[Any] = ()) -> Rows:
        """Run a statement and return its rows."""
        return self._connection.execute(text, values)

    def stream(self, text: str, values: Sequence[Any] = ()) -> Iterator[Any]:
        """Yield the rows of a query, without all rows in memory."""
        return self._connection.execute(text, values)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the write lock for a transaction. Commit at the end, and roll back after an error."""
        self._connection.execute("begin immediate")
        try:
            yield
        except BaseException:
            self._connection.execute("rollback")
            raise
        self._connection.execute("commit")

    def errors(self) -> contextlib.AbstractContextManager[None]:
        """Convert errors of the database to StorageError."""
        return _convert_errors(self.place)

    def bound_column(self, column: str) -> str:
        """Return an SQL expression that is null if the column has no BLOB, or if the BLOB is too large."""
        return f"case when typeof({column}) = 'blob' and length({column}) <= {MAX_VALUE_BYTES} then {column} end"

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def open_sqlite(place: HistoryPlace, *, create: bool) -> SqliteDatabase:
    """Open the database in a directory. Without ``create``, a missing database is empty.

    Raises StorageError as :meth:`hil.controller.storage.history.store.HistoryStore.open`.
    """
    path = place.folder / FILE
    with convert_os_errors(f"cannot use the history {place}", "check permissions, or choose another --history"):
        if create:
            place.folder.mkdir(parents=True, exist_ok=True)
        # Do not write to a database outside of this directory, and do not open a pipe.
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise StorageError(f"{path} is not a regular file", hint="choose another --history")
    return _open_file(place, str(path)) if create or path.exists() else open_empty(place)


def open_empty(place: HistoryPlace) -> SqliteDatabase:
    """Return the database of a missing history, which has no entries."""
    return _open_file(place, ":memory:")


def _open_file(place: HistoryPlace, path: str) -> SqliteDatabase:
    with _convert_errors(place):
        # Transactions are explicit.
        database = SqliteDatabase(place, sqlite3.connect(path, timeout=WAIT_S, isolation_level=None))
        try:
            # A file from another user must not run functions through its schema.
            database.execute("pragma trusted_schema = off")
            _prepare(database)
        except BaseException:
            database.close()
            raise
    return database


@contextlib.contextmanager
def _convert_errors(place: HistoryPlace) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise StorageError(
            f"cannot use the history {place}: {error}",
            hint="wait for other writers, free disk space, check permissions, or choose another --history",
        ) from error
    except (sqlite3.DatabaseError, UnicodeError, OverflowError) as error:
        raise StorageError(
            f"the history {place} is damaged: {error}",
            hint=f"move {FILE} away and add the runs again: hil history add RUN...",
        ) from error


def _prepare(database: SqliteDatabase) -> None:
    if not _read_schema(database):
        database.execute("pragma journal_mode = wal")
        with database.writing():
            if not _read_schema(database):  # another process may have created the tables in the meantime
                for table in _TABLES:
                    database.execute(table)
                database.execute(f"pragma application_id = {_APPLICATION}")
                database.execute(f"pragma user_version = {VERSION}")
    (application,) = database.execute("pragma application_id").fetchone()
    (version,) = database.execute("pragma user_version").fetchone()
    if application == _APPLICATION and version > VERSION:
        raise StorageError(
            f"the history {database.place} has format version {version}; this hil supports version {VERSION}",
            hint="update hil, or choose another --history",
        )
    # A view or trigger from another user could return or change arbitrary rows.
    if (application, version) != (_APPLICATION, VERSION) or _read_schema(database) != sorted(_TABLES):
        raise StorageError(f"{database.place.folder / FILE} is not a history of hil", hint="choose another --history")
    database.execute("pragma synchronous = full")


def _read_schema(database: SqliteDatabase) -> list[str]:
    return sorted(row[0] for row in database.execute("select sql from sqlite_master where sql is not null"))

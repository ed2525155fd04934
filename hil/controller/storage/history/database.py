"""Open and check the database of a history, and report its errors."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from hil.core.storage_errors import storage_errors
from hil.errors import StorageError

FILE = "history.sqlite"
# Increase the number when tables change.
_VERSION = 1
# Application id "hilH", which marks the file as a history of hil.
_APPLICATION = 0x68696C48
# Maximum wait for another writer. A writer has the lock for milliseconds, or while it deletes programs. Programs are
# copied without the lock.
_WAIT_S = 60.0
_TABLES = (
    "CREATE TABLE series (id text primary key, key text not null) without rowid",
    "CREATE TABLE entries (run text, case_name text, series text not null, created real not null,"
    " commit_id text not null, branch text not null, program text not null, outcome text not null, p50_ns real,"
    " document text not null, samples blob not null, confirmed text not null, primary key (run, case_name))",
    "CREATE INDEX entries_by_series on entries (series, created)",
    "CREATE INDEX entries_by_commit on entries (commit_id)",
    "CREATE TABLE annotations (number integer primary key, commit_id text not null, run text not null,"
    " case_name text not null, created real not null, text text not null)",
)


def open_database(folder: Path, *, create: bool) -> sqlite3.Connection:
    """Open the database of a history.

    Args:
        create: create the directory and the database if they are missing.

    Raises:
        StorageError: the directory is not usable, or the database is damaged, from a newer hil, or not a history.
    """
    path = folder / FILE
    with storage_errors(f"cannot use the history {folder}", "check permissions, or choose another --history"):
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        # Do not write to a database outside of this directory, and do not open a pipe.
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise StorageError(f"{path} is not a regular file", hint="choose another --history")
    with database_errors(folder):
        database = sqlite3.connect(path if create or path.exists() else ":memory:", timeout=_WAIT_S)
        try:
            database.isolation_level = None  # transactions are explicit
            # A file from another user must not run functions through its schema.
            database.execute("pragma trusted_schema = off")
            _prepare(database, folder)
        except BaseException:
            database.close()
            raise
    return database


def _prepare(database: sqlite3.Connection, folder: Path) -> None:
    if not _read_schema(database):
        database.execute("pragma journal_mode = wal")
        with writing(database):
            if not _read_schema(database):  # another process may have created the tables in the meantime
                for table in _TABLES:
                    database.execute(table)
                database.execute(f"pragma application_id = {_APPLICATION}")
                database.execute(f"pragma user_version = {_VERSION}")
    (application,) = database.execute("pragma application_id").fetchone()
    (version,) = database.execute("pragma user_version").fetchone()
    if application == _APPLICATION and version > _VERSION:
        raise StorageError(
            f"the history {folder} was written by a newer hil (version {version})",
            hint="update hil, or choose another --history",
        )
    # A view or trigger from another user could return or change arbitrary rows.
    if (application, version) != (_APPLICATION, _VERSION) or _read_schema(database) != sorted(_TABLES):
        raise StorageError(f"{folder / FILE} is not a history of hil", hint="choose another --history")
    database.execute("pragma synchronous = full")


def _read_schema(database: sqlite3.Connection) -> list[str]:
    return sorted(row[0] for row in database.execute("select sql from sqlite_master where sql is not null"))


@contextlib.contextmanager
def writing(database: sqlite3.Connection) -> Iterator[None]:
    """Hold the write lock for a transaction. Commit at the end, and roll back after an error."""
    database.execute("begin immediate")
    try:
        yield
    except BaseException:
        database.execute("rollback")
        raise
    database.execute("commit")


@contextlib.contextmanager
def database_errors(folder: Path) -> Iterator[None]:
    """Convert errors of the database to StorageError."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise StorageError(
            f"cannot use the history {folder}: {error}",
            hint="wait for other writers, free disk space, check permissions, or choose another --history",
        ) from error
    except (sqlite3.DatabaseError, UnicodeError, OverflowError) as error:
        raise StorageError(
            f"the history {folder} is damaged: {error}",
            hint=f"move {FILE} away and add the runs again: hil history add RUN...",
        ) from error

"""History in PostgreSQL: the tables are in the schema ``hil_history``."""

from __future__ import annotations

import contextlib
import secrets
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
from hil.controller.storage.history.place import HistoryPlace
from hil.core.install_hints import make_install_command
from hil.errors import StorageError, UsageError

try:
    import psycopg
except ImportError as error:
    raise UsageError("a history in PostgreSQL requires psycopg", hint=make_install_command("farm")) from error

# Advisory lock for creating the tables; any unused number.
_CREATE_LOCK = 0x68696C48
# Sort texts by their bytes, as SQLite does.
_TABLES = list_tables(
    text='text collate "C"',
    json="bytea",
    blob="bytea",
    real="double precision",
    serial="bigint generated always as identity",
    options="",
)
# The timeouts release the locks of a frozen process. A writer can need long to delete programs.
_CONFIGURE = f"""
    set search_path = hil_history; set lock_timeout = '{WAIT_S:g}s'; set idle_in_transaction_session_timeout = '10min'
"""
# Keepalives detect a machine that disappeared.
_PARAMETERS: dict[str, Any] = {
    "connect_timeout": 10,
    "application_name": "hil-history",
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
_PAGE_ROWS = 100


class PostgresDatabase(HistoryDatabase):
    """PostgreSQL database of a history."""

    def __init__(self, place: HistoryPlace, connection: psycopg.Connection[Any]) -> None:
        super().__init__(place)
        self._connection = connection

    def execute(self, text: str, values: Sequence[Any] = ()) -> Rows:
        """Run a statement and return its rows."""
        return self._connection.execute(_convert_values(text), values or None)

    def stream(self, text: str, values: Sequence[Any] = ()) -> Iterator[Any]:
        """Yield the rows of a query, without all rows in memory."""
        with self._connection.cursor(f"rows_{secrets.token_hex(8)}", withhold=True) as cursor:
            cursor.itersize = _PAGE_ROWS
            cursor.execute(_convert_values(text), values)
            yield from cursor

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the write lock for a transaction. Commit at the end, and roll back after an error."""
        with self._connection.transaction():
            # Readers do not wait for this lock.
            self._connection.execute("lock table series in share row exclusive mode")
            yield

    def errors(self) -> contextlib.AbstractContextManager[None]:
        """Convert errors of the database to StorageError."""
        return _convert_errors(self.place)

    def bound_column(self, column: str) -> str:
        """Return an SQL expression that is null if the column's value is too large."""
        return f"case when octet_length({column}) <= {MAX_VALUE_BYTES} then {column} end"

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def open_postgres(place: HistoryPlace, *, create: bool) -> PostgresDatabase | None:
    """Open the tables in a database, or return None if they are missing and ``create`` is False.

    Raises:
        StorageError: the database is unavailable, or its tables are from a newer hil.
        UsageError: the URL is invalid.
    """
    parameters = _choose_parameters(place)
    with _convert_errors(place):
        connection = psycopg.connect(place.url, autocommit=True, prepare_threshold=None, **parameters)
        try:
            connection.execute(_CONFIGURE)
            if _prepare(connection, place, create=create):
                return PostgresDatabase(place, connection)
        except BaseException:
            connection.close()
            raise
    connection.close()
    return None


def _choose_parameters(place: HistoryPlace) -> dict[str, Any]:
    """Return the parameters that the URL does not have. Raises UsageError if the URL is invalid."""
    hint = "postgresql://USER@HOST:PORT/DATABASE"
    try:
        given = psycopg.conninfo.conninfo_to_dict(place.url)
    except psycopg.ProgrammingError:
        # The message of psycopg may contain the password.
        raise UsageError(f"invalid PostgreSQL URL of the history {place}", hint=hint) from None
    if "@" in str(given.get("host") or "")[1:]:
        # The host is the end of a password, and messages of psycopg would contain it. Abstract sockets start with "@".
        raise UsageError(
            f"invalid PostgreSQL URL of the history {place}: a character of the password is not quoted",
            hint=f"{hint}; write %40 for @, and %2F for /, in a password",
        )
    return {name: value for name, value in _PARAMETERS.items() if name not in given}


def _prepare(connection: psycopg.Connection[Any], place: HistoryPlace, *, create: bool) -> bool:
    """Create missing tables. Return False if the tables are missing and ``create`` is False."""
    if not _has_tables(connection):
        if not create:
            return False
        with connection.transaction():
            connection.execute("select pg_advisory_xact_lock(%s)", [_CREATE_LOCK])
            if not _has_tables(connection):  # another process may have created the tables in the meantime
                connection.execute("create schema if not exists hil_history")
                for table in _TABLES:
                    connection.execute(table)
                connection.execute("create table version (number int not null)")
                connection.execute("insert into version values (%s)", [VERSION])
    row = connection.execute("select number from version").fetchone()
    if row is None or row[0] != VERSION:
        version = "no format version" if row is None else f"format version {row[0]}"
        raise StorageError(
            f"the history {place} has {version}; this hil supports version {VERSION}",
            hint="update hil, or choose another --history",
        )
    return True


def _has_tables(connection: psycopg.Connection[Any]) -> bool:
    # Do not use to_regclass: after the wait for the lock, it can still return the state before the wait.
    found = connection.execute("select from pg_tables where schemaname = 'hil_history' and tablename = 'version'")
    return found.rowcount > 0


def _convert_values(text: str) -> str:
    """Return SQL with psycopg's placeholders."""
    return text.replace("?", "%s")


@contextlib.contextmanager
def _convert_errors(place: HistoryPlace) -> Iterator[None]:
    try:
        yield
    except (psycopg.Error, UnicodeError) as error:
        # Messages of connection errors have several lines.
        text = " ".join(str(error).split()) or type(error).__name__
        raise StorageError(
            f"cannot use the history {place}: {text}",
            hint="check that the database accepts connections, and that you may write to it",
        ) from error

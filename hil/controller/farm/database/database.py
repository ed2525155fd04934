"""Connections to the farm's database, error conversion, and schema migrations.

The schema consists of procrastinate's and hil's tables, each from numbered files. ``hil.migrations`` records each
applied file in the same transaction, so an interrupted migration continues the next time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from hil.errors import FarmError, UsageError

Tx = psycopg.AsyncConnection[DictRow]
"""Connection with an open transaction; rows are dicts."""

_CONNECT_SECONDS = 5
_MAX_CONNECTIONS = 16
# The timeouts release the locks of a frozen program. Cached query plans are disabled, because a plan made for a small
# table uses full scans when the table has grown.
_CONFIGURE = """
    set idle_in_transaction_session_timeout = '5s'; set lock_timeout = '20s'; set timezone = 'UTC';
    set plan_cache_mode = force_custom_plan
"""
# Keepalives detect a machine that disappeared.
_ALIVE = {"keepalives_idle": "5", "keepalives_interval": "2", "keepalives_count": "3", "tcp_user_timeout": "10000"}
# These errors also mean an outage: the session exceeded the idle timeout, or the server became a read-only replica.
_AWAY = (
    psycopg.OperationalError,
    psycopg.errors.IdleInTransactionSessionTimeout,
    psycopg.errors.ReadOnlySqlTransaction,
)


class DatabaseAway(FarmError):
    """the farm's database is unavailable; retry"""


class Database:
    """Connection pool. Created by :meth:`open`; reconnects after outages."""

    def __init__(self, url: str, pool: AsyncConnectionPool[Tx]) -> None:
        self.url = url
        self.pool = pool

    @classmethod
    async def open(cls, url: str, *, patience_s: float = _CONNECT_SECONDS) -> Database:
        """Connect to the database.

        Args:
            patience_s: a transaction fails if the pool served no connection for this long.
        """
        # Do not print the pool's warnings, because this module raises errors for them. Logging configuration can enable
        # them.
        logging.getLogger("psycopg.pool").addHandler(logging.NullHandler())
        # Disable the pool's backoff, which would grow to minutes. Each request retries instead.
        pool = _Pool(
            url,
            kwargs={**choose_parameters(url), "row_factory": dict_row},
            configure=_configure_connection,
            check=AsyncConnectionPool.check_connection,
            min_size=2,
            max_size=_MAX_CONNECTIONS,
            timeout=patience_s,
            reconnect_timeout=1.0,
            open=False,
            name="farm",
        )
        database = cls(url, pool)
        try:
            # Fail early and report the cause. The pool would retry without reporting the cause.
            await (await connect(url)).close()
            with convert_outages():
                await pool.open(wait=True, timeout=_CONNECT_SECONDS)
        except BaseException:
            await pool.close()
            raise
        return database

    async def close(self) -> None:
        """Close all connections."""
        await self.pool.close()

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Tx]:
        """Open a transaction that commits at the end and rolls back on an error.

        Raises:
            DatabaseAway: the database is unavailable. If the transaction fails during the commit, the changes may have
                been made.
        """
        with convert_outages():
            async with self.pool.connection() as connection:
                yield connection


class _Pool(AsyncConnectionPool[Tx]):
    """Pool that keeps waiting while it is busy. A wait times out only if no caller got a connection in that time."""

    _served = 0.0

    async def getconn(self, timeout: float | None = None) -> Tx:
        while True:
            asked = time.monotonic()
            try:
                connection = await super().getconn(timeout)
            except PoolTimeout:
                if self._served < asked:
                    raise
            else:
                self._served = time.monotonic()
                return connection


async def connect(url: str) -> Tx:
    """Open a connection outside the pool in autocommit mode."""
    with convert_outages():
        return await psycopg.AsyncConnection.connect(
            url, autocommit=True, row_factory=dict_row, **choose_parameters(url)
        )


def choose_parameters(url: str) -> dict[str, Any]:
    """Return the default connection parameters that a URL does not set. Raises UsageError for an invalid URL."""
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError as error:
        said_of_it = _mask_password(f"invalid database URL {url!r}: {str(error).strip()}")
        raise UsageError(said_of_it, hint="postgresql://USER@HOST:PORT/DATABASE") from None
    ours = {"connect_timeout": _CONNECT_SECONDS, "application_name": "hil-farm", **_ALIVE}
    return {name: value for name, value in ours.items() if name not in given}


@contextlib.contextmanager
def convert_outages() -> Iterator[None]:
    """Convert outages of the database to :class:`DatabaseAway`. Other errors pass through."""
    try:
        yield
    except psycopg.errors.ProgramLimitExceeded:
        # Do not report an outage, because a retry would also fail. Usually a value exceeds the size limit of an index.
        raise
    except _AWAY as error:
        raise DatabaseAway(
            f"the farm's database does not respond: {str(error).strip() or type(error).__name__}",
            hint="hil retries; check that the database accepts connections, or start the built-in one: hil farm up",
        ) from error


def _mask_password(text: str) -> str:
    return re.sub(
        r"(:)[^@/\s]*@|(password=)[^\s'\"]*", lambda found: f"{found[1] or found[2]}...{'@' * bool(found[1])}", text
    )


async def _configure_connection(connection: Tx) -> None:
    await connection.set_autocommit(True)
    await connection.execute(_CONFIGURE)
    await connection.set_autocommit(False)


_CANCEL_AGAIN_SECONDS = 2.0


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait for all to end; ignore errors. If the caller is cancelled, the function still waits.

    The function cancels every two seconds. The reason is that before Python 3.12, ``asyncio.wait_for`` (also called by
    psycopg) ignores a cancellation that arrives together with the result. As a side effect, a task's cleanup is
    interrupted if it takes longer than two seconds.
    """
    cancelled: asyncio.CancelledError | None = None
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        try:
            await asyncio.wait(running, timeout=_CANCEL_AGAIN_SECONDS)
        except asyncio.CancelledError as error:
            cancelled = error
    await asyncio.gather(*tasks, return_exceptions=True)
    if cancelled is not None:
        raise cancelled


# Advisory lock for migrations; any unused number.
_LOCK = 0x68696C01
# Advisory lock: backups share it, and `hil farm gc` needs it alone, so that no file of a backup's snapshot is deleted.
BACKUP_LOCK = 0x68696C03

_NOTES = """
create schema if not exists hil;
create table if not exists hil.migrations (
    part text not null, name text not null, at timestamptz not null default now(), primary key (part, name)
);
"""


@dataclass(frozen=True)
class SchemaPart:
    """Schema of one component."""

    name: str
    steps: dict[str, str]  # migration name -> SQL, in order
    whole: str = ""  # SQL that creates the newest schema in a new database; "" if unavailable
    sign: str = ""  # table that exists only if the component is installed


async def migrate(url: str, parts: tuple[SchemaPart, ...] | None = None) -> list[str]:
    """Migrate a database and return the names of the applied migrations. A lock prevents concurrent migrations.

    Raises:
        FarmError: the database is newer than this program, or belongs to a different application.
        DatabaseAway: the database is unavailable.
    """
    parts = list_shipped_schemas() if parts is None else parts
    done: list[str] = []
    with convert_outages():
        async with await connect(url) as connection:
            await connection.execute("set lock_timeout = '60s'")
            await connection.execute("select pg_advisory_lock(%s)", [_LOCK])
            await connection.execute(_NOTES)
            # Check everything before the first change.
            plans = [(part, await _plan_migrations(connection, part)) for part in parts]
            for part, steps in plans:
                for names, sql in steps:
                    async with connection.transaction():
                        await connection.execute(sql)
                        await connection.cursor().executemany(
                            "insert into hil.migrations (part, name) values (%s, %s)",
                            [(part.name, name) for name in names],
                        )
                    done += names
    return done


async def _plan_migrations(connection: Tx, part: SchemaPart) -> list[tuple[list[str], str]]:
    """Return the pending migrations: lists of names with their SQL."""
    asked = await connection.execute("select name from hil.migrations where part = %s", [part.name])
    noted = {row["name"] for row in await asked.fetchall()}
    if unknown := sorted(noted - part.steps.keys()):
        raise FarmError(
            f"the farm's database is newer than this hil: it contains the {part.name} migration {unknown[-1]}",
            hint="install the hil version of the other gateways: pip install --upgrade 'hil[farm]'",
        )
    if not noted and part.sign:
        asked = await connection.execute("select 1 where to_regclass(%s) is not null", [part.sign])
        if asked.rowcount:
            raise FarmError(
                f"the database contains {part.name} tables that hil did not create",
                hint="use a separate database for the farm",
            )
    if not noted and part.whole:
        return [(list(part.steps), part.whole)]
    return [([name], sql) for name, sql in part.steps.items() if name not in noted]


def list_shipped_schemas() -> tuple[SchemaPart, ...]:
    """Return the schemas that this program contains."""
    theirs = resources.files("procrastinate") / "sql"
    ours = _read_sql_files("hil.controller.farm", "schema")
    return (
        SchemaPart(
            "procrastinate",
            _read_sql_files("procrastinate", "sql", "migrations"),
            whole=(theirs / "schema.sql").read_text("utf-8"),
            sign="procrastinate_jobs",
        ),
        SchemaPart("hil", ours, sign="hil.jobs"),
    )


def _read_sql_files(package: str, *folders: str) -> dict[str, str]:
    """Return name -> SQL of the files in a package directory, in order."""
    folder = resources.files(package).joinpath(*folders)
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    return {file.name.removesuffix(".sql"): file.read_text("utf-8") for file in files}

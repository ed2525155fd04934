"""The connections to the farm's database, its errors as ours, and its schema, made or brought up to date.

The schema is procrastinate's own and ours, each from numbered files. Which files were done is noted in
``hil.migrations``, each in the transaction that does it: it can be cut off at any moment and goes on the next time.
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
"""A connection in a transaction; rows are dicts."""

_CONNECT_S = 5
_MOST_CONNECTIONS = 16
# A program that is frozen in a transaction must not hold up all others: its locks go after this.
# A plan that is kept was made for tables as they were then: small, and read whole.
_CONFIGURE = """
    set idle_in_transaction_session_timeout = '5s'; set lock_timeout = '20s'; set timezone = 'UTC';
    set plan_cache_mode = force_custom_plan
"""
# A machine that vanished is noticed, though it says nothing any more.
_ALIVE = {"keepalives_idle": "5", "keepalives_interval": "2", "keepalives_count": "3", "tcp_user_timeout": "10000"}
# Beside the connection's own: we were silent for too long, or this server only follows another one by now.
_AWAY = (
    psycopg.OperationalError,
    psycopg.errors.IdleInTransactionSessionTimeout,
    psycopg.errors.ReadOnlySqlTransaction,
)


class DatabaseAway(FarmError):
    """The farm's database does not answer for now; what was asked may be asked again."""


class Database:
    """A pool of connections. Made by :meth:`open`; outages end by themselves."""

    def __init__(self, url: str, pool: AsyncConnectionPool[Tx]) -> None:
        self.url = url
        self.pool = pool

    @classmethod
    async def open(cls, url: str, *, patience_s: float = _CONNECT_S) -> Database:
        """Connect; a transaction that waits for a connection gives up where nobody was given one for ``patience_s``."""
        # Its warnings are our errors; who wants them in a log can have them.
        logging.getLogger("psycopg.pool").addHandler(logging.NullHandler())
        # After a failure the next one who asks tries again: the pool's own waits would grow to minutes.
        pool = _Pool(
            url,
            kwargs={**parameters(url), "row_factory": dict_row},
            configure=_configure,
            check=AsyncConnectionPool.check_connection,
            min_size=2,
            max_size=_MOST_CONNECTIONS,
            timeout=patience_s,
            reconnect_timeout=1.0,
            open=False,
            name="farm",
        )
        database = cls(url, pool)
        try:
            # The pool would go on trying, and not say why it cannot.
            await (await connect(url)).close()
            with seam():
                await pool.open(wait=True, timeout=_CONNECT_S)
        except BaseException:
            await pool.close()
            raise
        return database

    async def close(self) -> None:
        """End all connections."""
        await self.pool.close()

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Tx]:
        """All or nothing: committed at the end, rolled back where an error leaves it.

        Raises:
            DatabaseAway: it does not answer, or stopped answering. Where that happens at the very end, what was done
                may have been done nevertheless.
        """
        with seam():
            async with self.pool.connection() as connection:
                yield connection


class _Pool(AsyncConnectionPool[Tx]):
    """Busy is not away: whoever gets no connection in time, while others do, asks again."""

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
    """One connection beside the pool, where each statement is its own transaction."""
    with seam():
        return await psycopg.AsyncConnection.connect(url, autocommit=True, row_factory=dict_row, **parameters(url))


def parameters(url: str) -> dict[str, Any]:
    """What we say of a connection beside its URL, which goes first; UsageError where this is no URL of a PostgreSQL."""
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError as error:
        said_of_it = _without_password(f"{url!r} is no URL of a database: {str(error).strip()}")
        raise UsageError(said_of_it, hint="postgresql://USER@HOST:PORT/DATABASE") from None
    ours = {"connect_timeout": _CONNECT_S, "application_name": "hil-farm", **_ALIVE}
    return {name: value for name, value in ours.items() if name not in given}


@contextlib.contextmanager
def seam() -> Iterator[None]:
    """The database's failures leave it as :class:`DatabaseAway`; what is our own mistake stays what it is."""
    try:
        yield
    except psycopg.errors.ProgramLimitExceeded:
        # It would be refused for ever: what is too long for an index, above all.
        raise
    except _AWAY as error:
        raise DatabaseAway(
            f"the farm's database does not answer: {str(error).strip() or type(error).__name__}",
            hint="it is tried again; does it run, and may we connect to it? The farm's own is started by hil farm up",
        ) from error


def _without_password(text: str) -> str:
    return re.sub(
        r"(:)[^@/\s]*@|(password=)[^\s'\"]*", lambda found: f"{found[1] or found[2]}...{'@' * bool(found[1])}", text
    )


async def _configure(connection: Tx) -> None:
    await connection.set_autocommit(True)
    await connection.execute(_CONFIGURE)
    await connection.set_autocommit(False)


_CANCEL_AGAIN_S = 2.0


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until all have ended, with whatever they raise; whoever is cancelled meanwhile waits, too.

    They are told again until they hear: before Python 3.12 a task that is cancelled in the very moment in which what it
    waits for comes, in ``asyncio.wait_for`` (which psycopg calls as well), goes on as if nothing had been said. So who
    cleans up for more than two seconds is interrupted at it.
    """
    cancelled: asyncio.CancelledError | None = None
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        try:
            await asyncio.wait(running, timeout=_CANCEL_AGAIN_S)
        except asyncio.CancelledError as error:
            cancelled = error
    await asyncio.gather(*tasks, return_exceptions=True)
    if cancelled is not None:
        raise cancelled


# Any number that nobody else takes; who has its lock migrates.
_LOCK = 0x68696C01

_NOTES = """
create schema if not exists hil;
create table if not exists hil.migrations (
    part text not null, name text not null, at timestamptz not null default now(), primary key (part, name)
);
"""


@dataclass(frozen=True)
class Part:
    """One part's schema."""

    name: str
    steps: dict[str, str]  # SQL by name, from the first to the last
    whole: str = ""  # SQL that does what all of them do, for a new database; "" where there is none
    sign: str = ""  # a table that is there only where some of it is done


async def migrate(url: str, parts: tuple[Part, ...] | None = None) -> list[str]:
    """Bring a database's schema up to date; returns the names of what was done. One at a time does it.

    Raises:
        FarmError: the database is newer than this program, or is used for something else.
        DatabaseAway: it does not answer.
    """
    parts = shipped() if parts is None else parts
    done: list[str] = []
    with seam():
        async with await connect(url) as connection:
            await connection.execute("set lock_timeout = '60s'")
            await connection.execute("select pg_advisory_lock(%s)", [_LOCK])
            await connection.execute(_NOTES)
            # First all is looked at, then something is done.
            plans = [(part, await _plan(connection, part)) for part in parts]
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


async def _plan(connection: Tx, part: Part) -> list[tuple[list[str], str]]:
    """What is still to do: SQL, and the steps that are done with it."""
    asked = await connection.execute("select name from hil.migrations where part = %s", [part.name])
    noted = {row["name"] for row in await asked.fetchall()}
    if unknown := sorted(noted - part.steps.keys()):
        raise FarmError(
            f"the farm's database is newer than this program: it has {part.name}'s {unknown[-1]}",
            hint="install the hil that its other gateways have: pip install --upgrade 'hil[farm]'",
        )
    if not noted and part.sign:
        asked = await connection.execute("select 1 where to_regclass(%s) is not null", [part.sign])
        if asked.rowcount:
            raise FarmError(
                f"the database has {part.name}'s tables, but no farm made them", hint="give the farm one of its own"
            )
    if not noted and part.whole:
        return [(list(part.steps), part.whole)]
    return [([name], sql) for name, sql in part.steps.items() if name not in noted]


def shipped() -> tuple[Part, ...]:
    """All that this program knows."""
    theirs = resources.files("procrastinate") / "sql"
    ours = _read("hil.controller.farm", "schema")
    return (
        Part(
            "procrastinate",
            _read("procrastinate", "sql", "migrations"),
            whole=(theirs / "schema.sql").read_text("utf-8"),
            sign="procrastinate_jobs",
        ),
        Part("hil", ours, sign="hil.jobs"),
    )


def _read(package: str, *folders: str) -> dict[str, str]:
    """The SQL files of a folder by name, in order."""
    folder = resources.files(package).joinpath(*folders)
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    return {file.name.removesuffix(".sql"): file.read_text("utf-8") for file in files}

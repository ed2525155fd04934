"""The connections to the farm's database, and its errors as ours."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Iterator
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
        """Connect.

        Args:
            url: the database's.
            patience_s: a transaction that waits for a connection gives up where nobody was given one for so long.

        Raises:
            DatabaseAway: nothing answers there.
            UsageError: this is no URL of a PostgreSQL.
        """
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
            DatabaseAway: it does not answer, or stopped answering. Where that happens at the very end,
                what was done may have been done nevertheless.
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
    """What we say of a connection beside its URL, which goes first.

    Raises:
        UsageError: this is no URL of a PostgreSQL.
    """
    try:
        said = conninfo_to_dict(url)
    except psycopg.ProgrammingError as error:
        said_of_it = _without_password(f"{url!r} is no URL of a database: {str(error).strip()}")
        raise UsageError(said_of_it, hint="postgresql://USER@HOST:PORT/DATABASE") from None
    ours = {"connect_timeout": _CONNECT_S, "application_name": "hil-farm", **_ALIVE}
    return {name: value for name, value in ours.items() if name not in said}


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

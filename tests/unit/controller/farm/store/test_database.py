"""The connections to the database: all or nothing, outages, and what they are called."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from hil.controller.farm.store.database import Database, DatabaseAway, end_tasks
from hil.controller.farm.store.embedded_database import Embedded
from hil.controller.farm.store.notifications import listen, tell
from hil.errors import UsageError

PATIENCE_S = 1.0
NOTE = "insert into hil.audit (user_name, role, action, allowed) values ('ann', 'admin', 'drain', true)"


def with_database(url: str, work: Callable[[Database], Awaitable[None]], patience_s: float = 5.0) -> None:
    async def main() -> None:
        database = await Database.open(url, patience_s=patience_s)
        try:
            await work(database)
        finally:
            await database.close()

    asyncio.run(main())


async def one(database: Database, query: str) -> Any:
    async with database.transaction() as tx:
        row = await (await tx.execute(query)).fetchone()
        assert row is not None
        return next(iter(row.values()))


def test_a_transaction_is_all_or_nothing(farm_db: str) -> None:
    async def work(database: Database) -> None:
        with pytest.raises(ZeroDivisionError):
            async with database.transaction() as tx:
                await tx.execute(NOTE)
                raise ZeroDivisionError
        assert await one(database, "select count(*) from hil.audit") == 0
        async with database.transaction() as tx:
            await tx.execute(NOTE)
        assert await one(database, "select count(*) from hil.audit") == 1

    with_database(farm_db, work)


def test_a_mistake_of_ours_is_no_outage(farm_db: str) -> None:
    async def work(database: Database) -> None:
        with pytest.raises(psycopg.errors.UndefinedTable):
            await one(database, "select * from hil.nothing")
        with pytest.raises(psycopg.errors.ProgramLimitExceeded):
            await one(database, f"insert into hil.shares (user_name) values ('{secrets.token_hex(20_000)}')")

    with_database(farm_db, work)


def test_where_many_ask_at_once_all_are_served_in_the_end(farm_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hil.controller.farm.store.database._MOST_CONNECTIONS", 2)

    patience_s = 3.0

    async def work(database: Database) -> None:
        started = time.monotonic()
        asked = [one(database, "select 1 from pg_sleep(0.1)") for _ in range(80)]
        assert await asyncio.gather(*asked) == [1] * 80
        assert time.monotonic() - started > patience_s

    # Who was stopped for longer than that may take it for an outage.
    with_database(farm_db, work, patience_s=patience_s)


def test_where_nobody_is_served_it_is_an_outage(farm_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hil.controller.farm.store.database._MOST_CONNECTIONS", 2)

    async def work(database: Database) -> None:
        async with database.transaction(), database.transaction():
            for _ in range(2):
                with pytest.raises(DatabaseAway, match="couldn't get a connection"):
                    await one(database, "select 1")
        assert await one(database, "select 1") == 1

    with_database(farm_db, work, patience_s=PATIENCE_S)


def test_connections_that_were_ended_are_replaced(farm_db: str) -> None:
    async def work(database: Database) -> None:
        killed = "select count(pg_terminate_backend(pid)) from pg_stat_activity where datname = current_database()"
        with psycopg.connect(farm_db, autocommit=True) as other:
            other.execute(killed + " and pid <> pg_backend_pid()")
        assert await one(database, "select 1") == 1

    with_database(farm_db, work)


def test_a_connection_that_ends_within_a_transaction_is_an_outage(farm_db: str) -> None:
    async def work(database: Database) -> None:
        with pytest.raises(DatabaseAway) as caught:
            async with database.transaction() as tx:
                with psycopg.connect(farm_db, autocommit=True) as other:
                    other.execute("select pg_terminate_backend(%s)", [tx.info.backend_pid])
                await tx.execute("select 1")
        assert "tried again" in caught.value.hint
        assert await one(database, "select 1") == 1

    with_database(farm_db, work)


def test_who_is_frozen_in_a_transaction_holds_up_nobody_for_long(farm_db: str) -> None:
    async def work(database: Database) -> None:
        assert await one(database, "show idle_in_transaction_session_timeout") == "5s"
        with pytest.raises(DatabaseAway):
            async with database.transaction() as frozen:
                await frozen.execute("set local idle_in_transaction_session_timeout = '100ms'")
                await frozen.execute("select pg_advisory_xact_lock(1)")
                assert await one(database, "select pg_advisory_xact_lock(1)") == ""
                await frozen.execute("select 1")

    with_database(farm_db, work)


def test_outages_of_the_server_end_by_themselves(tmp_path: Path) -> None:
    """Killed hard, away, and there again: connections, followers and the queue's listeners come back."""
    server = Embedded(tmp_path, settings={"fsync": "off"})
    url = server.start()
    heard: list[dict[str, Any]] = []

    async def follow() -> None:
        async for change in listen(url):
            heard.append(change)

    async def told(database: Database) -> None:
        # A connection may take its time on a slow machine: nothing was sent to a server where none came.
        for _ in range(30):
            with contextlib.suppress(DatabaseAway):
                async with database.transaction() as tx:
                    await tell(tx, {"kind": "board", "board": "pi"})
                return

    async def until(count: int) -> None:
        for _ in range(3000):
            if len(heard) >= count:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(heard)

    async def work(database: Database) -> None:
        following = asyncio.create_task(follow())
        await until(1)
        for outage in range(2):
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            await asyncio.to_thread(server._process.wait)
            began = asyncio.get_running_loop().time()
            with pytest.raises(DatabaseAway):
                await one(database, "select 1")
            assert asyncio.get_running_loop().time() - began < 10  # a pool of its own would wait ever longer
            await asyncio.to_thread(server.start)
            await until(2 + 2 * outage)
            await told(database)
            await until(3 + 2 * outage)
        await end_tasks(following)
        assert heard == [{"kind": "again"}, *[{"kind": "again"}, {"kind": "board", "board": "pi"}] * 2]

    try:
        with_database(url, work, patience_s=0.5)
    finally:
        server.stop()


@pytest.mark.parametrize("url", ["postgresql://postgres@127.0.0.1:1/hil", "postgresql:///x?host=/nowhere"])
def test_where_nothing_answers(url: str) -> None:
    with pytest.raises(DatabaseAway):
        asyncio.run(Database.open(url))


@pytest.mark.parametrize("url", ["mysql://x/y", "postgresql://h/d?colour=red", "x"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(UsageError, match="is no URL of a database") as caught:
        asyncio.run(Database.open(url))
    assert "postgresql://" in caught.value.hint


@pytest.mark.parametrize(
    "url", ["mysql://ann:secret@h/d", "postgresql://ann:secret@h/d?colour=red", "password=secret x"]
)
def test_a_password_is_not_told(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        asyncio.run(Database.open(url))
    assert "secret" not in str(caught.value) and "..." in str(caught.value)

"""Test database connections: transactions, outages and error messages."""

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
from support.waiting import allowed_s

from hil.controller.farm.database.database import Database, DatabaseAway, end_tasks
from hil.controller.farm.database.embedded_database import EmbeddedDatabase
from hil.controller.farm.database.notifications import listen, publish_change
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


def test_transaction_commits_all_or_rolls_back(farm_db: str) -> None:
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


def test_query_error_differs_from_outage(farm_db: str) -> None:
    async def work(database: Database) -> None:
        with pytest.raises(psycopg.errors.UndefinedTable):
            await one(database, "select * from hil.nothing")
        with pytest.raises(psycopg.errors.ProgramLimitExceeded):
            await one(database, f"insert into hil.shares (user_name) values ('{secrets.token_hex(20_000)}')")

    with_database(farm_db, work)


@pytest.mark.ci
def test_database_serves_more_queries_than_connections(farm_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hil.controller.farm.database.database._MAX_CONNECTIONS", 2)

    patience_s = 3.0

    async def work(database: Database) -> None:
        started = time.monotonic()
        asked = [one(database, "select 1 from pg_sleep(0.1)") for _ in range(80)]
        assert await asyncio.gather(*asked) == [1] * 80
        assert time.monotonic() - started > patience_s

    # A client that waits longer than its patience may report an outage.
    with_database(farm_db, work, patience_s=patience_s)


@pytest.mark.ci
def test_database_reports_outage_when_pool_stays_busy(farm_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hil.controller.farm.database.database._MAX_CONNECTIONS", 2)

    async def work(database: Database) -> None:
        async with database.transaction(), database.transaction():
            for _ in range(2):
                with pytest.raises(DatabaseAway, match="couldn't get a connection"):
                    await one(database, "select 1")
        assert await one(database, "select 1") == 1

    with_database(farm_db, work, patience_s=PATIENCE_S)


@pytest.mark.ci
def test_database_replaces_terminated_connections(farm_db: str) -> None:
    async def work(database: Database) -> None:
        killed = "select count(pg_terminate_backend(pid)) from pg_stat_activity where datname = current_database()"
        with psycopg.connect(farm_db, autocommit=True) as other:
            other.execute(killed + " and pid <> pg_backend_pid()")
        assert await one(database, "select 1") == 1

    with_database(farm_db, work)


def test_lost_connection_in_transaction_raises_outage(farm_db: str) -> None:
    async def work(database: Database) -> None:
        with pytest.raises(DatabaseAway) as caught:
            async with database.transaction() as tx:
                with psycopg.connect(farm_db, autocommit=True) as other:
                    other.execute("select pg_terminate_backend(%s)", [tx.info.backend_pid])
                await tx.execute("select 1")
        assert "hil retries" in caught.value.hint
        assert await one(database, "select 1") == 1

    with_database(farm_db, work)


def test_frozen_transaction_releases_locks_after_timeout(farm_db: str) -> None:
    async def work(database: Database) -> None:
        assert await one(database, "show idle_in_transaction_session_timeout") == "5s"
        with pytest.raises(DatabaseAway):
            async with database.transaction() as frozen:
                await frozen.execute("set local idle_in_transaction_session_timeout = '100ms'")
                await frozen.execute("select pg_advisory_xact_lock(1)")
                assert await one(database, "select pg_advisory_xact_lock(1)") == ""
                await frozen.execute("select 1")

    with_database(farm_db, work)


@pytest.mark.ci
def test_database_clients_recover_from_server_crash(tmp_path: Path) -> None:
    """Kill the server twice; connections, followers and queue listeners must reconnect."""
    server = EmbeddedDatabase(tmp_path, settings={"fsync": "off"})
    url = server.start()
    heard: list[dict[str, Any]] = []

    async def follow() -> None:
        async for change in listen(url):
            heard.append(change)

    async def told(database: Database) -> None:
        # A connection may be slow on a loaded machine, so retry.
        for _ in range(30):
            with contextlib.suppress(DatabaseAway):
                async with database.transaction() as tx:
                    await publish_change(tx, {"kind": "board", "board": "pi"})
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
            assert asyncio.get_running_loop().time() - began < allowed_s(
                10
            )  # the pool's default would wait much longer
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
def test_database_reports_unreachable_server(url: str) -> None:
    with pytest.raises(DatabaseAway):
        asyncio.run(Database.open(url))


@pytest.mark.parametrize("url", ["mysql://x/y", "postgresql://h/d?colour=red", "x"])
def test_database_rejects_invalid_url(url: str) -> None:
    with pytest.raises(UsageError, match="invalid database URL") as caught:
        asyncio.run(Database.open(url))
    assert "postgresql://" in caught.value.hint


@pytest.mark.parametrize(
    "url", ["mysql://ann:secret@h/d", "postgresql://ann:secret@h/d?colour=red", "password=secret x"]
)
def test_database_error_hides_password(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        asyncio.run(Database.open(url))
    assert "secret" not in str(caught.value) and "..." in str(caught.value)

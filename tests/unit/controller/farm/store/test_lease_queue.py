"""Test the queue: a grant reaches one gateway, in its transaction, and is deleted with its lease."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from procrastinate.exceptions import ConnectorException
from procrastinate.manager import JobManager
from support import farm_rows
from support.farm_rows import rows

import hil
from hil.controller.farm.database.database import Database, DatabaseAway
from hil.controller.farm.leasing.lease_queue import LeaseQueue

Work = Callable[[Database, LeaseQueue], Awaitable[None]]


@contextlib.asynccontextmanager
async def desk(url: str, **options: Any) -> AsyncIterator[tuple[Database, LeaseQueue]]:
    database = await Database.open(url)
    queue = LeaseQueue(database, **options)
    try:
        await queue.open()
        yield database, queue
    finally:
        await queue.close()
        await database.close()


def with_desk(url: str, work: Work, **options: Any) -> None:
    async def main() -> None:
        async with desk(url, **options) as (database, queue):
            await work(database, queue)

    asyncio.run(main())


async def read(database: Database, query: str) -> list[dict[str, Any]]:
    async with database.transaction() as tx:
        return await rows(tx, query)


async def bring(database: Database, queue: LeaseQueue, board: str, lease: int) -> int:
    async with database.transaction() as tx:
        return await queue.queue_lease(tx, board, lease)


def test_queue_delivers_lease_to_matching_board(farm_db: str) -> None:
    async def work(database: Database, queue: LeaseQueue) -> None:
        await bring(database, queue, "pi", 1)
        await bring(database, queue, "jetson", 2)
        assert await queue.fetch(["beagle"]) == []
        assert await queue.fetch([]) == []
        assert sorted(await queue.fetch(["pi", "jetson", "beagle"])) == [1, 2]
        assert await queue.fetch(["pi", "jetson"]) == []

    with_desk(farm_db, work)


def test_queue_delivers_lease_to_single_gateway(farm_db: str) -> None:
    async def work(database: Database, queue: LeaseQueue) -> None:
        async with desk(farm_db) as (_, other):
            for lease in range(10):
                queue_id = await bring(database, queue, "pi", lease)
                fetched = await asyncio.gather(*[one.fetch(["pi"]) for one in (queue, other) * 3])
                assert sorted(map(len, fetched)) == [0] * 5 + [1]
                async with database.transaction() as tx:
                    await queue.done(tx, queue_id)

    with_desk(farm_db, work)


def test_queue_ignores_rolled_back_lease(farm_db: str) -> None:
    async def work(database: Database, queue: LeaseQueue) -> None:
        with contextlib.suppress(ZeroDivisionError):
            async with database.transaction() as tx:
                await queue.queue_lease(tx, "pi", 1)
                raise ZeroDivisionError
        assert await queue.fetch(["pi"]) == []

    with_desk(farm_db, work)


def test_queue_delivers_next_lease_after_previous_ends(farm_db: str) -> None:
    async def work(database: Database, queue: LeaseQueue) -> None:
        first = await bring(database, queue, "pi", 1)
        await bring(database, queue, "pi", 2)
        assert await queue.fetch(["pi"]) == [1]
        assert await queue.fetch(["pi"]) == []
        async with database.transaction() as tx:
            await queue.done(tx, first)
        assert await queue.fetch(["pi"]) == [2]
        assert len(await read(database, "select id from procrastinate_jobs")) == 1

    with_desk(farm_db, work)


def test_queue_drops_lease_done_before_fetch(farm_db: str) -> None:
    async def work(database: Database, queue: LeaseQueue) -> None:
        async with database.transaction() as tx:
            await queue.done(tx, await queue.queue_lease(tx, "pi", 1))
        assert await queue.fetch(["pi"]) == []

    with_desk(farm_db, work)


def test_queue_done_accepts_repeats_and_unknown_ids(farm_db: str) -> None:
    async def work(database: Database, queue: LeaseQueue) -> None:
        queue_id = await bring(database, queue, "pi", 1)
        for one in (queue_id, queue_id, 10**9, None):
            async with database.transaction() as tx:
                await queue.done(tx, one)
        assert await read(database, "select id from procrastinate_jobs") == []

    with_desk(farm_db, work)


@pytest.mark.parametrize("name", ["x" * 200, "ÄÖÜ" * 30, "a b'c\"d;%s", "pi"])
def test_queue_accepts_any_board_name(farm_db: str, name: str) -> None:
    async def work(database: Database, queue: LeaseQueue) -> None:
        await bring(database, queue, name, 1)
        await bring(database, queue, name + "2", 2)
        assert await queue.fetch([name]) == [1]
        assert await queue.fetch([name + "2"]) == [2]

    with_desk(farm_db, work)


def test_queue_notifies_listener_on_commit(farm_db: str) -> None:
    async def work(database: Database, queue: LeaseQueue) -> None:
        heard: asyncio.Queue[set[str] | None] = asyncio.Queue()
        listening = asyncio.create_task(queue.listen(heard.put_nowait))
        assert await asyncio.wait_for(heard.get(), 60) is None  # means that anything may have changed before
        async with database.transaction() as tx:
            await queue.queue_lease(tx, "pi", 1)
            await asyncio.sleep(0.1)
            assert heard.empty()
        assert await asyncio.wait_for(heard.get(), 60) == {"pi"}
        await bring(database, queue, "jetson", 2)
        assert await asyncio.wait_for(heard.get(), 60) == {"jetson"}
        listening.cancel()

    with_desk(farm_db, work)


def test_queue_registers_gateway_while_open(farm_db: str) -> None:
    workers = "select id, last_heartbeat from procrastinate_workers"

    async def work(database: Database, queue: LeaseQueue) -> None:
        (first,) = await read(database, workers)
        while (await read(database, workers))[0]["last_heartbeat"] == first["last_heartbeat"]:
            await asyncio.sleep(0.02)
        await queue.close()
        assert await read(database, workers) == []

    with_desk(farm_db, work, beat_s=0.05)


def test_queue_restores_deleted_gateway_registration(farm_db: str) -> None:
    async def work(database: Database, queue: LeaseQueue) -> None:
        await bring(database, queue, "pi", 1)
        async with database.transaction() as tx:
            await tx.execute("delete from procrastinate_workers")
        assert await queue.fetch(["pi"]) == [1]
        assert len(await read(database, "select id from procrastinate_workers")) == 1

    with_desk(farm_db, work)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_queue_redelivers_leases_lost_in_outage(farm_db: str, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    fetch, calls = JobManager.fetch_job, itertools.count(1)

    async def fetch_and_lose(*args: Any, **options: Any) -> Any:
        job = await fetch(*args, **options)
        if next(calls) == call:
            # The server commits, but the answer is lost.
            raise ConnectorException from psycopg.OperationalError("the connection is lost")
        return job

    async def work(database: Database, queue: LeaseQueue) -> None:
        boards = ["pi", "jetson", "beagle"]
        for lease, name in enumerate(boards):
            await bring(database, queue, name, lease)
        monkeypatch.setattr(JobManager, "fetch_job", fetch_and_lose)
        with pytest.raises(DatabaseAway):
            await queue.fetch(boards)
        assert await queue.fetch(boards) == [0, 1, 2]
        assert await queue.fetch(boards) == []

    with_desk(farm_db, work)


def test_queue_tidy_deletes_dead_gateways_and_ended_leases(farm_db: str) -> None:
    async def work(database: Database, queue: LeaseQueue) -> None:
        async with database.transaction() as tx:
            await farm_rows.board(tx, "pi")
            await farm_rows.board(tx, "jetson")
            submission = await farm_rows.submission(tx, 2)
            over = await farm_rows.lease(tx, await farm_rows.job(tx, submission), "pi", over=True)
            active = await farm_rows.lease(tx, await farm_rows.job(tx, submission, 2), "jetson")
            await queue.queue_lease(tx, "pi", over)
            await queue.queue_lease(tx, "jetson", active)
        async with desk(farm_db) as (_, dead):
            assert sorted(await dead.fetch(["pi", "jetson"])) == [over, active]
            async with database.transaction() as tx:
                await tx.execute(
                    "update procrastinate_workers set last_heartbeat = now() - interval '1 hour'"
                    " where id = (select max(id) from procrastinate_workers)"
                )
            async with database.transaction() as tx:
                assert await queue.remove_stale(tx) == 1
                assert await queue.remove_stale(tx) == 0
        assert len(await read(database, "select id from procrastinate_workers")) == 1
        left = await read(database, "select args ->> 'lease' as lease, status from procrastinate_jobs")
        assert left == [{"lease": str(active), "status": "doing"}]

    with_desk(farm_db, work)


def test_queue_tidy_and_done_run_concurrently(farm_db: str) -> None:
    async def work(database: Database, queue: LeaseQueue) -> None:
        for _ in range(20):
            queue_id = await bring(database, queue, "pi", 1)  # of an unknown lease, so tidy deletes it

            async def done(queue_id: int = queue_id) -> None:
                async with database.transaction() as tx:
                    await queue.done(tx, queue_id)

            async def tidy() -> None:
                async with database.transaction() as tx:
                    await queue.remove_stale(tx)

            await asyncio.gather(tidy(), done(), tidy(), done())
            assert await read(database, "select id from procrastinate_jobs") == []

    with_desk(farm_db, work)


def test_only_lease_queue_imports_procrastinate() -> None:
    package = Path(hil.__file__).parent
    found = [
        path for path in package.rglob("*.py") if re.search(r"^\s*(import|from) procrastinate", path.read_text(), re.M)
    ]
    assert [path.name for path in found] == ["lease_queue.py"]

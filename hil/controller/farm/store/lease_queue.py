"""The queue that brings leases to the gateways of their boards: procrastinate, and the only module that knows it.

A granted lease is a job in its board's queue, deferred in the transaction that grants it. The gateway where the board's
worker is fetches it, and it is deleted in the transaction that ends the lease. Its lock is the board's, so that not
even procrastinate would run two jobs of a board at once.

Jobs are deferred through procrastinate's public interface. The rest has none: its public ``Worker`` runs a job to its
end, in the process and for the queues that it was started with. A lease is run by another process, for boards that come
and go, and ends in a transaction of ours. So this module calls what ``Worker`` calls (``JobManager.register_worker``,
``fetch_job``, ``update_heartbeat``, ``unregister_worker``), and the schema's versioned functions where it must be one
transaction with our rows (``procrastinate_finish_job_v1``, ``procrastinate_prune_stalled_workers_v1``). Hence
procrastinate is pinned to a minor version (pyproject.toml).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any, cast

import procrastinate
import psycopg
from procrastinate import exceptions
from procrastinate.jobs import Job
from psycopg_pool import AsyncConnectionPool

from hil.controller.farm.store import notifications
from hil.controller.farm.store.database import Database, DatabaseAway, Tx, end_tasks, seam

CHANNEL = "hil_farm_boards"
_TASK = "hil.lease"
_BEAT_S, _STALLED_S = 10.0, 60.0
# `procrastinate_queue_v1#` and the queue's name are the name of a channel, which has at most 63 bytes.
_LONGEST_QUEUE = 63 - len("procrastinate_queue_v1#")

# Locked first: one that is gone is no error, and whoever else would delete it waits or passes it over.
_DONE = """
    select procrastinate_finish_job_v1(id, 'succeeded', true) from (
        select id from procrastinate_jobs where id = %s and status in ('todo', 'doing') for update) as job
"""
_TAKEN = """
    select (args ->> 'lease')::bigint as lease from procrastinate_jobs
    where task_name = %s and status = 'doing' and queue_name = any(%s) order by id
"""
_TIDY = """
    select procrastinate_finish_job_v1(id, 'succeeded', true) from (
        select id from procrastinate_jobs as job
        where task_name = %s and status in ('todo', 'doing') and not exists (
            select from hil.leases where leases.id = (job.args ->> 'lease')::bigint and ended_at is null)
        for update skip locked) as job
"""
_LOG = logging.getLogger("hil.farm.queue")


class LeaseQueue:
    """The queue, as a gateway uses it: one of procrastinate's workers. Opened and closed by its owner."""

    def __init__(self, database: Database, *, beat_s: float = _BEAT_S) -> None:
        self._database = database
        self._beat_s = beat_s
        self._connector = procrastinate.PsycopgConnector()
        self._app = procrastinate.App(connector=self._connector)
        self._manager = self._app.job_manager
        self._worker: int | None = None
        self._fetching, self._unsure = asyncio.Lock(), False
        self._beating: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Register as a worker, and stay registered; DatabaseAway where the database does not answer."""
        with _seam():
            # It asks for rows of its own sort wherever it matters.
            await self._connector.open_async(cast("AsyncConnectionPool[Any]", self._database.pool))
            self._worker = await self._manager.register_worker()
        self._beating = asyncio.create_task(self._beat())

    async def close(self) -> None:
        """Take the leave of the queue."""
        if self._beating is not None:
            await end_tasks(self._beating)
            self._beating = None
        if self._worker is not None:
            with contextlib.suppress(DatabaseAway), _seam():
                await self._manager.unregister_worker(self._worker)
            self._worker = None

    async def bring(self, tx: Tx, board: str, lease: int) -> int:
        """Queue a lease for its board's gateway, if this transaction is committed; returns the number in the queue."""
        task = self._app.configure_task(_TASK, queue=_queue(board), lock=board, connection=tx)
        with _seam():
            queued = await task.defer_async(lease=lease, board=board)
        await tx.execute("select pg_notify(%s, %s)", [CHANNEL, board])
        return queued

    async def fetch(self, boards: Collection[str]) -> list[int]:
        """Take what is queued for these boards: leases, each of which one gateway gets once. Only after an outage
        some may come again: what was taken when the database went away was heard by nobody.
        """
        queues = {_queue(board) for board in boards}
        async with self._fetching:
            leases = await self._taken(queues) if self._unsure else []
            self._unsure = True
            while queues and (job := await self._fetch(queues)) is not None:
                leases.append(int(str(job.task_kwargs["lease"])))
                # A board's lock lets through one at a time.
                queues.discard(job.queue)
            self._unsure = False
            return leases

    async def done(self, tx: Tx, queue_id: int | None) -> None:
        """Delete a lease's job, fetched or not, if this transaction is committed; it may be gone already."""
        if queue_id is not None:
            await tx.execute(_DONE, [queue_id])

    async def listen(self, callback: Callable[[set[str] | None], object]) -> None:
        """Call with the boards for which something was queued; with None where it may be any (at first, and after an
        outage). Without end: to be cancelled.
        """
        async with contextlib.aclosing(notifications.hear(self._database.url, CHANNEL)) as heard:
            async for board in heard:
                callback(None if board is None else {board})

    async def tidy(self, tx: Tx) -> int:
        """Forget gateways that are not heard of any more, and delete jobs whose lease is over; returns how many."""
        await tx.execute("select procrastinate_prune_stalled_workers_v1(%s)", [_STALLED_S])
        return (await tx.execute(_TIDY, [_TASK])).rowcount

    async def _taken(self, queues: set[str]) -> list[int]:
        async with self._database.transaction() as tx:
            return [row["lease"] async for row in await tx.execute(_TAKEN, [_TASK, list(queues)])]

    async def _fetch(self, queues: set[str]) -> Job | None:
        for _ in range(2):
            if self._worker is None:
                with _seam():
                    self._worker = await self._manager.register_worker()
            try:
                with _seam():
                    return await self._manager.fetch_job(list(queues), self._worker)
            except psycopg.errors.ForeignKeyViolation:
                # We were silent for so long that we were forgotten.
                self._worker = None
        raise DatabaseAway("the farm's queue does not know this gateway")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                if self._worker is not None:
                    with _seam():
                        await self._manager.update_heartbeat(self._worker)
                async with self._database.transaction() as tx:
                    await self.tidy(tx)
            except DatabaseAway as error:
                _LOG.warning("the gateway cannot say that it is there: %s", error.message)
            except Exception:
                # A gateway that says nothing any more would be forgotten.
                _LOG.exception("the queue could not be tidied")


def _queue(board: str) -> str:
    """A board's queue."""
    name = f"board:{board}"
    if len(name.encode()) <= _LONGEST_QUEUE:
        return name
    return f"board#{hashlib.sha256(board.encode()).hexdigest()[:32]}"


@contextlib.contextmanager
def _seam() -> Iterator[None]:
    """Procrastinate's errors leave it as the database's, and those as ours."""
    with seam():
        try:
            yield
        except exceptions.ConnectorException as error:
            if isinstance(error.__cause__, psycopg.Error):
                raise error.__cause__ from None
            raise

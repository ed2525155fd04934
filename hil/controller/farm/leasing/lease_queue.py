"""Queue that delivers leases to the gateways of their boards. The only module that uses procrastinate.

A granted lease is a job in its board's queue, deferred in the transaction of the grant. The gateway of the board's
worker fetches the job. The job is deleted in the transaction that ends the lease. The lock is the board's name, so that
procrastinate never runs two jobs of a board at the same time.

This module uses procrastinate's public API only to defer jobs. The public ``Worker`` runs jobs in its own process, for
queues that are fixed at startup. For a lease, a different process runs the job, boards appear and disappear, and the
lease ends in a transaction of this package. So this module calls the functions that ``Worker`` calls
(``JobManager.register_worker``, ``fetch_job``, ``update_heartbeat``, ``unregister_worker``). For transactions shared
with hil's tables it calls versioned SQL functions (``procrastinate_finish_job_v1``,
``procrastinate_prune_stalled_workers_v1``). Hence procrastinate is pinned to a minor version (pyproject.toml).
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

from hil.controller.farm.database import notifications
from hil.controller.farm.database.database import Database, DatabaseAway, Tx, convert_outages, end_tasks

CHANNEL = "hil_farm_boards"
_TASK = "hil.lease"
_BEAT_S, _STALLED_S = 10.0, 60.0
# The channel name `procrastinate_queue_v1#QUEUE` has at most 63 bytes.
_MAX_QUEUE_LENGTH = 63 - len("procrastinate_queue_v1#")

# Lock the row before the deletion. A missing row is not an error, and a concurrent deletion waits for the lock or skips
# the row.
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
    """Queue of a gateway, registered as a procrastinate worker.

    Call :meth:`open` before use and :meth:`close` at the end.
    """

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
        """Register as a worker and send heartbeats. Raises DatabaseAway if the database is unavailable."""
        with _convert_errors():
            # The type of the pool's rows does not matter, because procrastinate sets a row factory on each query.
            await self._connector.open_async(cast("AsyncConnectionPool[Any]", self._database.pool))
            self._worker = await self._manager.register_worker()
        self._beating = asyncio.create_task(self._send_beats())

    async def close(self) -> None:
        """Unregister the worker."""
        if self._beating is not None:
            await end_tasks(self._beating)
            self._beating = None
        if self._worker is not None:
            with contextlib.suppress(DatabaseAway), _convert_errors():
                await self._manager.unregister_worker(self._worker)
            self._worker = None

    async def queue_lease(self, tx: Tx, board: str, lease: int) -> int:
        """Queue a lease for the board's gateway when this transaction commits. Returns the queue id."""
        task = self._app.configure_task(_TASK, queue=_make_queue_name(board), lock=board, connection=tx)
        with _convert_errors():
            queued = await task.defer_async(lease=lease, board=board)
        await tx.execute("select pg_notify(%s, %s)", [CHANNEL, board])
        return queued

    async def fetch(self, boards: Collection[str]) -> list[int]:
        """Fetch the queued leases of these boards. Each lease is delivered to a single gateway.

        After an outage, leases may be delivered twice: the result of the interrupted fetch is unknown.
        """
        queues = {_make_queue_name(board) for board in boards}
        async with self._fetching:
            leases = await self._read_taken_leases(queues) if self._unsure else []
            self._unsure = True
            while queues and (job := await self._fetch_job(queues)) is not None:
                leases.append(int(str(job.task_kwargs["lease"])))
                # The board's lock allows one job at a time.
                queues.discard(job.queue)
            self._unsure = False
            return leases

    async def done(self, tx: Tx, queue_id: int | None) -> None:
        """Delete a lease's queue entry when this transaction commits. A missing entry is not an error."""
        if queue_id is not None:
            await tx.execute(_DONE, [queue_id])

    async def listen(self, callback: Callable[[set[str] | None], object]) -> None:
        """Task: call ``callback`` with the boards of new queue entries.

        The argument is None in the first call and after an outage, because any board may then have entries.
        """
        async with contextlib.aclosing(notifications.iter_notifications(self._database.url, CHANNEL)) as heard:
            async for board in heard:
                callback(None if board is None else {board})

    async def remove_stale(self, tx: Tx) -> int:
        """Remove lost gateways and the entries of ended leases. Returns the number of removed entries."""
        await tx.execute("select procrastinate_prune_stalled_workers_v1(%s)", [_STALLED_S])
        return (await tx.execute(_TIDY, [_TASK])).rowcount

    async def _read_taken_leases(self, queues: set[str]) -> list[int]:
        async with self._database.transaction() as tx:
            return [row["lease"] async for row in await tx.execute(_TAKEN, [_TASK, list(queues)])]

    async def _fetch_job(self, queues: set[str]) -> Job | None:
        for _ in range(2):
            if self._worker is None:
                with _convert_errors():
                    self._worker = await self._manager.register_worker()
            try:
                with _convert_errors():
                    return await self._manager.fetch_job(list(queues), self._worker)
            except psycopg.errors.ForeignKeyViolation:
                # After a long silence, procrastinate has removed this worker.
                self._worker = None
        raise DatabaseAway("this gateway is not registered in the farm's queue")

    async def _send_beats(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                if self._worker is not None:
                    with _convert_errors():
                        await self._manager.update_heartbeat(self._worker)
                async with self._database.transaction() as tx:
                    await self.remove_stale(tx)
            except DatabaseAway as error:
                _LOG.warning("gateway heartbeat failed: %s", error.message)
            except Exception:
                # Log the error and continue, because a gateway without heartbeats would be removed.
                _LOG.exception("queue cleanup failed")


def _make_queue_name(board: str) -> str:
    """Return the queue name of a board."""
    name = f"board:{board}"
    if len(name.encode()) <= _MAX_QUEUE_LENGTH:
        return name
    return f"board#{hashlib.sha256(board.encode()).hexdigest()[:32]}"


@contextlib.contextmanager
def _convert_errors() -> Iterator[None]:
    """Raise procrastinate's errors as database errors. Convert outages to DatabaseAway."""
    with convert_outages():
        try:
            yield
        except exceptions.ConnectorException as error:
            if isinstance(error.__cause__, psycopg.Error):
                raise error.__cause__ from None
            raise

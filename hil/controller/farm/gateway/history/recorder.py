"""Add the results of finished jobs to the history, in the background.

A column of each job stores whether the job was added. A killed gateway therefore continues after a restart. Adding a
job twice has no effect, so multiple gateways can add the same job.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from pathlib import Path

from hil.controller.farm.client.results import EndedJob
from hil.controller.farm.database.database import DatabaseAway
from hil.controller.farm.database.notifications import drain_queue
from hil.controller.farm.gateway.artifacts import ArtifactStore
from hil.controller.farm.gateway.context import GatewayContext
from hil.controller.farm.gateway.history.job_entries import make_job_entries
from hil.controller.farm.gateway.history.job_programs import JobPrograms
from hil.controller.farm.store import event_log, queries
from hil.controller.farm.store.records import JOBS, NAME, fetch_rows, make_storable
from hil.controller.pipeline.settings.history_settings import HistorySettings
from hil.controller.records.measurements.history import AddedEntries
from hil.controller.storage.history.store import HistoryStore
from hil.core.storage_errors import convert_os_errors
from hil.errors import HilError, StorageError, UsageError

_LOG = logging.getLogger("hil.farm.gateway")
# Poll interval, in case a notification is lost, and delay after an error of the storage.
_LOOK_S, _RETRY_S = 30.0, 10.0
_GATHER_S = 0.2
# Jobs of one query.
_PAGE_JOBS = 100
_MAX_REASON = 1000
_PENDING = f"""
    select job.id, {NAME} as name, coalesce(last.board, '') as board from {JOBS}
    left join lateral (
        select lease.board from hil.leases as lease where lease.job = job.id order by lease.id desc limit 1
    ) as last on true
    where job.state = 'done' and not job.in_history and job.kind in ('run', 'bundle', 'suite') and job.id > %s
    order by job.id limit {_PAGE_JOBS}
"""
_ADDED = "update hil.jobs set in_history = true where id = %s and not in_history"


class HistoryRecorder:
    """Recorder of finished jobs."""

    def __init__(self, context: GatewayContext, settings: HistorySettings) -> None:
        self._context, self._settings = context, settings
        self._reported = ""  # error of the storage that the event log already has

    async def run(self) -> None:
        """Task: add finished jobs. An error never changes the job's result."""
        with self._context.pubsub.subscribe() as queue:
            while True:
                if await self._add_pending_jobs():
                    await drain_queue(queue, _LOOK_S)
                    # Add the jobs of a burst of changes together.
                    await asyncio.sleep(_GATHER_S)
                else:
                    await asyncio.sleep(_RETRY_S)

    async def _add_pending_jobs(self) -> bool:
        """Add all finished jobs. Return False if the storage failed for some of them."""
        trouble, last = "", 0
        while True:
            async with self._context.db.transaction() as tx:
                rows = await fetch_rows(tx, _PENDING, [last])
            for row in rows:
                try:
                    await self._add_job(row["id"], row["name"], row["board"])
                except StorageError as error:
                    trouble = error.message
            if len(rows) < _PAGE_JOBS:
                break
            last = rows[-1]["id"]
        await self._report_trouble(trouble)
        return not trouble

    async def _add_job(self, number: int, name: str, board: str) -> None:
        """Add a job, or report why its result cannot be added. Raises StorageError if a retry can help."""
        added, problems = 0, []
        try:
            async with self._context.db.transaction() as tx:
                [row] = await queries.result(tx, name, specs=True)
            job = EndedJob.from_row(row)
            report = await asyncio.to_thread(add_job, job, board, self._settings, self._context.store)
            added, problems = report.added, report.skipped
        except (StorageError, DatabaseAway):
            raise
        except HilError as error:
            problems = [error.message]
        except Exception:  # one invalid result must not stop the others
            _LOG.exception("history.failed", extra={"job": name})
            problems = ["internal error; see the gateway's log"]
        reason = "; ".join(problems)[:_MAX_REASON]
        async with self._context.db.transaction() as tx:
            if (await tx.execute(_ADDED, [number])).rowcount and reason:
                await event_log.note_unrecorded(tx, name, reason)
        _LOG.info("history.added", extra={"job": name, "entries": added, "reason": reason})

    async def _report_trouble(self, trouble: str) -> None:
        if trouble and trouble != self._reported:
            _LOG.warning("history.unavailable", extra={"reason": trouble})
            async with self._context.db.transaction() as tx:
                await event_log.note_host(
                    tx, "history", self._context.name, make_storable(trouble[:_MAX_REASON]), kind="gateway"
                )
        self._reported = trouble


def add_job(job: EndedJob, board: str, settings: HistorySettings, artifacts: ArtifactStore) -> AddedEntries:
    """Add the cases of a finished job and their programs to the history.

    Raises:
        FarmError: the job's record is invalid.
        StorageError: the history or the file store cannot be used.
    """
    skipped: list[str] = []
    programs = JobPrograms(artifacts, job.result.files, skipped)
    records = programs.list_records()
    entries = make_job_entries(job, records, board)
    with (
        convert_os_errors("cannot add to the history", "free disk space, and check the permissions of HIL_FARM_HOME"),
        _open_history(settings) as store,
        tempfile.TemporaryDirectory(prefix="hil-history-") as folder,
    ):
        missing = {digest: record for digest, record in records.items() if store.program(digest) is None}
        report = store.add(entries, programs.fetch(missing, Path(folder), settings.quota))
    report.skipped[:0] = skipped
    return report


def _open_history(settings: HistorySettings) -> HistoryStore:
    """Open the history. Raises StorageError also for invalid settings, because they do not make the job invalid."""
    try:
        return HistoryStore.open(settings.place, create=True, quota=settings.quota, baseline=settings.baseline)
    except UsageError as error:
        raise StorageError(error.message, hint=error.hint) from error

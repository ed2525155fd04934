"""Following jobs: what state each is in, whenever that changes, and what they print, until all have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

from hil.controller.farm.gateway.calls import Call
from hil.controller.farm.gateway.context import GatewayContext
from hil.controller.farm.messages import JobState, job_name, parse_job
from hil.controller.farm.rpc import status_message
from hil.controller.farm.store import event_log, queries
from hil.controller.farm.store.database import Tx
from hil.controller.farm.store.notifications import Change, drained
from hil.controller.farm.store.queries import unrunnable
from hil.errors import UsageError
from hil.protocol.v1 import farm_pb2 as pb

MOST_NAMES = 1000
# As many as an order may have.
_MOST_JOBS = 100_000
# Should a notification be lost, jobs are looked at again so often.
_LOOK_S = 5.0
_GATHER_S, _LATE_S = 0.05, 0.2
# So many changes at a time are read one by one; of more, all jobs are read at once.
_FEW = 16
_FINAL = {JobState.DONE.value, JobState.CANCELLED.value}
_JOBS = """
    select job.id, job.submission, job.number, submission.jobs
    from hil.jobs as job join hil.submissions as submission on submission.id = job.submission
    where job.submission = any(%s) order by job.id
"""


class JobFollower:
    """One follower of some jobs.

    Args:
        parts: the gateway's.
        call: the stream to it.
        logs: whether it is told what the jobs print.
        after: the last line of the logs that it has seen.
    """

    def __init__(self, context: GatewayContext, call: Call, *, logs: bool, after: int) -> None:
        self._context, self._call, self._logs, self._after = context, call, logs, after
        self._names: dict[int, str] = {}
        self._told: dict[str, pb.JobStatus] = {}
        self._open: set[str] = set()

    async def run(self, names: Collection[str]) -> None:
        """Tell until all jobs have ended."""
        with self._context.pubsub.subscribed() as queue:
            async with self._context.db.transaction() as tx:
                await self._find(tx, names)
            self._open = set(self._names.values())
            await self._look(None)
            loop = asyncio.get_running_loop()
            looked = whole = loop.time()
            while self._open:
                # Many changes that come one after another are looked at together.
                await asyncio.sleep(looked + _GATHER_S - loop.time())
                changes, looked = await drained(queue, _LOOK_S), loop.time()
                await self._call.still_good()
                touched = self._touched(changes)
                # How the boards are is looked at now and then, for that changes often and matters rarely.
                if looked - whole >= _LOOK_S:
                    touched = None
                whole = looked if touched is None else whole
                if touched is None or touched:
                    await self._look(touched)
                if touched is None:
                    await self._call.send(pb.FollowReply())  # its reader hears that this gateway is there
            if self._logs:
                # What a job printed last goes another way than how it ended, and may come a little later.
                await asyncio.sleep(_LATE_S)
                await self._look(set())

    def _touched(self, changes: list[Change]) -> set[str] | None:
        """The jobs that changes are of, "" for logs alone; None where all must be looked at."""
        if not changes or any(change["kind"] == "again" for change in changes):
            return None
        touched = set()
        for change in changes:
            if change["kind"] == "job" and change["job"] in self._names:
                touched.add(self._names[change["job"]])
            elif change["kind"] == "log" and self._logs and change["job"] in self._names:
                touched.add("")
        return touched

    async def _find(self, tx: Tx, names: Collection[str]) -> None:
        """Which jobs are meant: a submission's name means all of its jobs."""
        wanted = {(*parse_job(name), name) for name in names}
        rows = await (await tx.execute(_JOBS, [list({submission for submission, _, _ in wanted})])).fetchall()
        for submission, number, name in wanted:
            found = [row for row in rows if row["submission"] == submission and number in (None, row["number"])]
            if not found:
                raise UsageError(f"the farm has no job {name}", hint="hil farm status lists them; old ones are deleted")
            if len(self._names) + len(found) > _MOST_JOBS:
                raise UsageError(f"at most {_MOST_JOBS} jobs can be followed at a time")
            for row in found:
                self._names[row["id"]] = job_name(row["submission"], row["number"], row["jobs"])

    async def _look(self, touched: set[str] | None) -> None:
        """Read what may have changed, the states before the logs: what a job printed is told before its end."""
        async with self._context.db.transaction() as tx:
            found = await self._jobs(tx, touched)
            why = await unrunnable(tx, found)
            printed = await event_log.output_after(tx, list(self._names), self._after) if self._logs else []
        while printed:
            for row in printed:
                self._after = row["number"]
                await self._call.send(pb.FollowReply(log=pb.LogText(**row)))
            async with self._context.db.transaction() as tx:
                printed = await event_log.output_after(tx, list(self._names), self._after)
        for job in found:
            status = status_message(job, why.get(job["name"], ""))
            if self._told.get(job["name"]) != status:
                self._told[job["name"]] = status
                await self._call.send(pb.FollowReply(job=status))
            if job["state"] in _FINAL:
                self._open.discard(job["name"])

    async def _jobs(self, tx: Tx, touched: set[str] | None) -> list[Mapping[str, Any]]:
        named = self._open if touched is None else touched & self._open
        if len(named) <= _FEW:
            return [await queries.job(tx, name) for name in sorted(named)]
        found: list[Mapping[str, Any]] = []
        for submission in sorted({parse_job(name)[0] for name in named}):
            jobs = await queries.jobs(tx, submission=submission, limit=_MOST_JOBS)
            found += [job for job in jobs if job["name"] in named]
        return found

"""Serve lease holders: queue the lease, then keep the lease with the holder's heartbeats.

If the holder's stream breaks, the lease waits a while for the holder to resume (``ResumeLease``, at any gateway). If
the holder ends the stream, the farm takes the board back immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from hil.controller.farm.database.database import DatabaseAway, Tx, end_tasks
from hil.controller.farm.database.notifications import AGAIN, Change, drain_queue, publish_change
from hil.controller.farm.gateway.calls import GatewayCall
from hil.controller.farm.gateway.context import GatewayContext
from hil.controller.farm.leasing import leases, submissions
from hil.controller.farm.messages import ENDED, GrantedLease, JobState, Kind, Submission
from hil.controller.farm.rpc import decode_submission, encode_lease, encode_status
from hil.controller.farm.store import access, queries
from hil.controller.farm.store.records import fetch_rows
from hil.errors import AccessRefused, HilError, UsageError
from hil.protocol.v1 import farm_pb2 as pb

_LOG = logging.getLogger("hil.farm.gateway")
# Poll interval, in case a notification is lost.
_LOOK_SECONDS = 2.0
# Time for other gateways to report that they serve the holder now.
_ANSWER_SECONDS = 5.0
_BEAT, _LEFT = {"kind": "beat"}, {"kind": "left"}


class LeaseHolder:
    """Stream of a lease holder."""

    def __init__(self, context: GatewayContext, call: GatewayCall) -> None:
        self._context, self._call = context, call
        self._lease, self._key = 0, ""
        # True after the holder left. The queue also has an entry for this event, but a full queue drops entries.
        self._left = False

    async def run(self, requests: AsyncIterator[pb.LeaseRequest]) -> None:
        """Serve the holder's stream up to the end of the lease."""
        first = await anext(aiter(requests), pb.LeaseRequest())
        with self._context.pubsub.subscribe() as queue:
            hearing = asyncio.create_task(self._read_beats(requests, queue))
            try:
                kind = first.WhichOneof("kind")
                if kind == "open":
                    await self._queue_lease(first.open, queue)
                elif kind == "resume":
                    await self._resume_lease(first.resume)
                else:
                    raise UsageError("expected an open or resume message first")
                if self._lease:
                    await self._keep_lease(queue)
            finally:
                await end_tasks(hearing)

    async def _read_beats(self, requests: AsyncIterator[pb.LeaseRequest], queue: asyncio.Queue[Change]) -> None:
        async for request in requests:
            if request.WhichOneof("kind") == "beat":
                await queue.put(_BEAT)
        if await self._call.has_ended_requests():
            self._left = True
            await queue.put(_LEFT)

    async def _queue_lease(self, wanted: pb.Submission, queue: asyncio.Queue[Change]) -> None:
        """Queue a lease job and wait for a board. If the stream breaks, cancel the job after a while."""
        context, call, order = self._context, self._call, decode_submission(wanted)
        if [spec.kind for spec in order.specs] != [Kind.LEASE]:
            raise UsageError("a lease request must contain a single job of kind lease")
        async with context.db.transaction() as tx:
            done = await submissions.submit(tx, context.engine, call.who, order, "", context.settings)
            [row] = await fetch_rows(tx, "select id from hil.jobs where submission = %s", [done.submission])
            same = {"title": order.title, "selector": order.selector, "board": order.board}
            fields = {**same, **list_more_boards(order)}
            await access.note_audit(tx, call.who, call.name, str(done.submission), True, fields)
        context.dispatch.trigger_check()
        [name] = done.jobs
        try:
            await self._wait_for_board(name, row["id"], queue)
        except BaseException:  # cancelled, or the error of a cancelled query
            if not self._lease and not call.leaving:
                # The holder may reconnect with the same submission key. If the holder does not reconnect, cancel the
                # job.
                context.spawn(self._cancel_unless_resumed(name, row["id"]))
            raise

    async def _wait_for_board(self, name: str, job: int, queue: asyncio.Queue[Change]) -> None:
        context, call = self._context, self._call
        sent: pb.JobStatus | None = None
        look_s = min(_LOOK_SECONDS, context.settings.holder_s / 4)
        changes: list[Change] = []
        while not self._lease:
            async with context.db.transaction() as tx:
                found = await queries.job(tx, name)
                lease = await leases.lease_of_job(tx, job)
                granted = await self._read_grant(tx, lease) if lease is not None else None
                if lease is not None and granted is None:
                    await leases.wait_for_start(tx, lease, context.settings)
                waiting = await queries.blocked(tx, [found], context.settings)
                if _has_change(changes, "holder?", job):
                    await publish_change(tx, {"kind": "holder", "job": job})
            if granted is not None and lease is not None:
                self._lease, self._key = lease, granted.key
                await call.send(pb.LeaseReply(granted=granted))
                return
            if found.state in ENDED:
                await call.send(pb.LeaseReply(over=found.reason or found.outcome or found.state))
                return
            if (status := encode_status(found, blocked=waiting.get(name, ""))) != sent:
                sent = status
                await call.send(pb.LeaseReply(waiting=status))
            else:
                await call.send(pb.LeaseReply(beat=pb.Beat()))
            looked = time.monotonic()
            while True:
                changes = await drain_queue(queue, look_s)
                if _has_relevant_change(changes, job) or time.monotonic() - looked >= look_s:
                    break
                await call.recheck_token()
            if self._left:
                async with context.db.transaction() as tx:
                    await submissions.cancel(tx, context.engine, call.who, name, context.settings)
                return

    async def _read_grant(self, tx: Tx, lease: int) -> pb.LeaseGranted | None:
        """Return the grant for the holder, or None while the board's host has not prepared the board."""
        held = await leases.read_holding(tx, lease)
        grant = await leases.read_grant(tx, lease, self._context.settings)
        if held is None or not held.started or grant is None:
            return None
        card = held.card.replace(direct=held.direct)
        return encode_lease(GrantedLease(grant, card, held.key))

    async def _resume_lease(self, asked: pb.ResumeLease) -> None:
        """Resume a lease for a holder that presents the key."""
        async with self._context.db.transaction() as tx:
            known = asked.key.isprintable()
            held = known and await leases.renew_holder(tx, asked.lease, asked.key, self._context.settings)
            granted = await self._read_grant(tx, asked.lease) if held else None
            why = await leases.end_of(tx, asked.lease, asked.key) if known and not held else None
        if why is not None:
            await self._call.send(pb.LeaseReply(over=why))
            return
        if granted is None:
            raise AccessRefused(f"lease {asked.lease} has ended, or the key is invalid")
        self._lease, self._key = asked.lease, asked.key
        await self._call.send(pb.LeaseReply(granted=granted))

    async def _keep_lease(self, queue: asyncio.Queue[Change]) -> None:
        """Renew the lease on each heartbeat. Release the lease when the holder leaves."""
        context, call = self._context, self._call
        while True:
            changes = await drain_queue(queue, _LOOK_SECONDS)
            await call.recheck_token()
            if self._left:
                async with context.db.transaction() as tx:
                    await leases.release(tx, context.engine, self._lease, self._key, "released", context.settings)
                context.dispatch.trigger_check()
                _LOG.info("released", extra={"lease": self._lease, "user": call.who.user})
                return
            for change in changes:
                if change["kind"] == "ended" and change["lease"] == self._lease:
                    await call.send(pb.LeaseReply(over=change["reason"]))
                    return
            # A heartbeat may find the lease ended before the notification arrives.
            if _BEAT in changes and (why := await self._renew_lease()):
                await call.send(pb.LeaseReply(over=why))
                return

    async def _renew_lease(self) -> str:
        """Renew the lease. Returns the reason for the lease's end, or "" if the lease is active.

        While the database is unavailable, heartbeats are not acknowledged and no lease expires.
        """
        try:
            async with self._context.db.transaction() as tx:
                held = await leases.renew_holder(tx, self._lease, self._key, self._context.settings)
                why = "" if held else await leases.end_of(tx, self._lease, self._key) or "the lease has ended"
        except DatabaseAway:
            return ""
        if held:
            await self._call.send(pb.LeaseReply(beat=pb.Beat()))
        return why

    async def _cancel_unless_resumed(self, name: str, job: int) -> None:
        """Cancel a job unless the holder reconnects to any gateway in time."""
        await asyncio.sleep(self._context.settings.holder_s)
        # If this fails, the job is granted later and the lease expires without a holder.
        with contextlib.suppress(HilError):
            if await self._has_holder(job):
                return
            async with self._context.db.transaction() as tx:
                found = await queries.job(tx, name)
                if found.state == JobState.QUEUED.value:
                    await submissions.cancel(tx, self._context.engine, self._call.who, name, self._context.settings)

    async def _has_holder(self, job: int) -> bool:
        """Return True if any gateway serves a holder of the job."""
        with self._context.pubsub.subscribe() as queue:
            changes = [AGAIN]
            while True:
                if AGAIN in changes:  # notifications were lost: ask all gateways
                    async with self._context.db.transaction() as tx:
                        await publish_change(tx, {"kind": "holder?", "job": job})
                    deadline = time.monotonic() + _ANSWER_SECONDS
                changes = await drain_queue(queue, max(deadline - time.monotonic(), 0.0))
                if _has_change(changes, "holder", job):
                    return True
                if time.monotonic() >= deadline and AGAIN not in changes:
                    return False


def list_more_boards(order: Submission) -> dict[str, Any]:
    """Return the requests for the boards after the first, for the audit."""
    return {"more": [asdict(one) for one in order.more]} if order.more else {}


def _has_change(changes: list[Change], kind: str, job: int) -> bool:
    return any(change["kind"] == kind and change["job"] == job for change in changes)


def _has_relevant_change(changes: list[Change], job: int) -> bool:
    """Return True if changes may concern a job, the holder, or the end of this stream."""
    return any(change["kind"] in ("again", "started", "left") for change in changes) or any(
        _has_change(changes, kind, job) for kind in ("job", "holder?")
    )

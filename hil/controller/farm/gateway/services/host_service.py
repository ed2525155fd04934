"""Service ``Hosts``: workers attach with their boards, receive jobs, and report results."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Iterable

from hil.controller.farm import telemetry
from hil.controller.farm.database.database import end_tasks
from hil.controller.farm.database.notifications import publish_change
from hil.controller.farm.gateway.attached_workers import AttachedWorker
from hil.controller.farm.gateway.calls import GatewayCall
from hil.controller.farm.gateway.context import GatewayContext
from hil.controller.farm.gateway.log_buffer import Case
from hil.controller.farm.leasing import leases
from hil.controller.farm.rpc import DIAL_KEY, decode_card, decode_result
from hil.controller.farm.store import access
from hil.controller.farm.store.case_results import LONGEST
from hil.controller.farm.store.records import LEASES, fetch_rows
from hil.errors import UsageError
from hil.protocol.v1 import farm_pb2 as pb

_LOG = logging.getLogger("hil.farm.gateway")
_LEASED = f"select lease.board, submission.trace from {LEASES} where lease.id = %s"
_MAX_LEASES = 100
_MAX_TEXT = 1 << 20
# Maximum cases per message. Hosts send fewer.
_MAX_CASES = 2000
# Maximum messages that wait for a worker to read them.
_MAX_UNREAD = 10_000


class HostService:
    """Methods of the service."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context

    async def attend(self, requests: AsyncIterator[pb.FromBoard], call: GatewayCall) -> None:
        """Serve the stream of a board's worker.

        If the worker ends the stream, the board is set offline. After a broken connection, the board stays online for a
        while, so that the worker can reconnect.
        """
        first = await anext(aiter(requests), pb.FromBoard())
        if first.WhichOneof("kind") != "hello":
            raise UsageError("expected a hello message first")
        attending = await self._attach_worker(first.hello, call, None)
        writing = asyncio.create_task(self._send_messages(attending, call))
        hearing = asyncio.create_task(self._read_messages(attending, requests, call))
        try:
            await asyncio.wait({writing, hearing}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
            hearing.result()
            # The worker ended the stream on purpose, so set the board offline immediately.
            if await call.has_ended_requests() and self._context.dispatch.leave(attending):
                await self._context.dispatch.release(attending)
        finally:
            self._context.dispatch.leave(attending)
            await end_tasks(writing, hearing)

    async def report(self, request: pb.ReportRequest, call: GatewayCall) -> pb.ReportReply:
        """Record the result of a job."""
        context, result, worker = self._context, decode_result(request.result), _check_worker_name(request.worker)
        await context.log_buffer.flush(request.lease)
        context.dispatch.remove_lease(request.lease, worker)
        began = time.time()
        async with context.db.transaction() as tx:
            recorded, reason = await leases.report(
                tx, context.engine, request.lease, worker, result, request.fence, context.settings
            )
            fields = {"recorded": recorded, "exit_code": result.exit_code, "outcome": result.outcome}
            await access.note_audit(tx, call.who, call.name, f"lease {request.lease}", True, fields)
            leased = await fetch_rows(tx, _LEASED, [request.lease])
        context.dispatch.trigger_check()
        for row in leased if telemetry.is_on() else ():
            telemetry.record("record", row["trace"], began, time.time(), lease=request.lease, **fields)
        _LOG.info("reported", extra={**fields, "lease": request.lease, "reason": reason or result.reason})
        for row in leased if recorded else ():
            context.metrics.count_result(row["board"], result.outcome or "NONE", is_final=not result.infrastructure)
        return pb.ReportReply(recorded=recorded, reason=reason)

    async def accept(self, requests: AsyncIterator[pb.Piece], call: GatewayCall) -> None:
        """Serve the host's side of a connection that a lease holder opened."""
        await self._context.tunnels.find(call.metadata.get(DIAL_KEY, "")).join(requests, call)

    async def _attach_worker(self, hello: pb.Hello, call: GatewayCall, before: AttachedWorker | None) -> AttachedWorker:
        card, worker = decode_card(hello.card), _check_worker_name(hello.worker)
        if before is not None and (before.board, before.worker) != (card.name, worker):
            raise UsageError("an attached worker cannot change its name or its board")
        attending = before or AttachedWorker(card, worker)
        attending.card, attending.leases = card, set(_check_leases(hello.leases))
        if before is None:
            self._context.dispatch.enter(attending)
        try:
            await self._context.dispatch.register_board(attending, call.who if before is None else None)
        except BaseException:
            self._context.dispatch.leave(attending)
            raise
        return attending

    async def _read_messages(
        self, attending: AttachedWorker, requests: AsyncIterator[pb.FromBoard], call: GatewayCall
    ) -> None:
        context = self._context
        async for message in requests:
            attending.heard_at = time.monotonic()
            await call.recheck_token()
            if attending.outgoing.qsize() > _MAX_UNREAD:
                raise UsageError("the worker does not read incoming messages")
            kind = message.WhichOneof("kind")
            if kind == "hello":
                await self._attach_worker(message.hello, call, attending)
            elif kind == "beat":
                attending.leases, attending.beaten = set(_check_leases(message.beat.leases)), True
            elif kind == "started":
                lease, direct = message.started.lease, message.started.direct[:1000].replace("\0", "")
                async with context.db.transaction() as tx:
                    await leases.record_start(tx, lease, attending.worker, direct)
            elif kind == "printed":
                # Only accept output of leases of this worker's board.
                if attending.has_had(message.printed.lease):
                    said = message.printed
                    await context.log_buffer.add(said.lease, said.text[:_MAX_TEXT], _truncate_cases(said.cases))
            elif kind == "switched":
                about = {"id": message.switched.id, "error": message.switched.error.replace("\0", "")}
                async with context.db.transaction() as tx:
                    await publish_change(tx, {"kind": "switched", **about})
            else:
                raise UsageError("empty message from the worker")

    async def _send_messages(self, attending: AttachedWorker, call: GatewayCall) -> None:
        while True:
            await call.send(await attending.outgoing.get())


def _truncate_cases(cases: Iterable[pb.CaseEnded]) -> tuple[Case, ...]:
    cut = ((one.name[:LONGEST], one.outcome[:LONGEST], one.reason[:LONGEST]) for one in cases)
    return tuple(itertools.islice(cut, _MAX_CASES))


def _check_worker_name(name: str) -> str:
    if not 1 <= len(name) <= 200 or not name.isprintable():
        raise UsageError("worker name must have 1 to 200 printable characters")
    return name


def _check_leases(numbers: Iterable[int]) -> list[int]:
    held = list(numbers)
    if len(held) > _MAX_LEASES:
        raise UsageError(f"a worker can have at most {_MAX_LEASES} leases")
    return held

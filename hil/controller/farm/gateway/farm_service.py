"""The service ``Farm``: what users ask for and change."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator

import psycopg

from hil.controller.farm import telemetry
from hil.controller.farm.desk import access as desk
from hil.controller.farm.desk import changes, leases, reading, submissions
from hil.controller.farm.gateway.calls import Call
from hil.controller.farm.gateway.checking import json_object, order_of
from hil.controller.farm.gateway.deeds import Deeds
from hil.controller.farm.gateway.following import MOST_NAMES, Following
from hil.controller.farm.gateway.holding import Holding
from hil.controller.farm.gateway.parts import Parts
from hil.controller.farm.stubs import LEASE_KEY, LEASE_SECRET_KEY
from hil.errors import AccessRefused, UsageError
from hil.protocol.v1 import farm_pb2 as pb

_LOG = logging.getLogger("hil.farm.gateway")
# All of it goes into the audit.
_MOST_ARGUMENTS = 20_000


class FarmService:
    """Coroutines of the service's methods."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._deeds = Deeds(parts)

    async def submit(self, request: pb.SubmitRequest, call: Call) -> pb.SubmitReply:
        """Queue jobs, and give them boards at once where some are free."""
        parts, order = self._parts, order_of(request.order)
        trace = request.trace if len(request.trace) <= 100 and request.trace.isprintable() else ""
        with telemetry.span("submit", trace, user=call.who.user, title=order.title, jobs=len(order.specs)) as span:
            async with parts.db.transaction() as tx:
                done = await submissions.submit(tx, parts.engine, call.who, order, span.traceparent, parts.terms)
                said = {"title": order.title, "jobs": len(done.jobs), "selector": order.selector, "board": order.board}
                async with tx.pipeline():
                    await desk.note_audit(tx, call.who, call.name, str(done.submission), True, said)
                    granted = await leases.grants_of_submission(tx, done.submission, parts.terms)
            parts.dispatch.give(granted)
            parts.dispatch.poke()
        _LOG.info("submitted", extra={"job": str(done.submission), "user": call.who.user, **said})
        return pb.SubmitReply(submission=done.submission, jobs=done.jobs)

    async def ask(self, request: pb.AskRequest, call: Call) -> pb.Answer:
        """Read."""
        call.admit(request.what)
        arguments = json_object(request.arguments, f"what {request.what!r} is asked with")
        try:
            async with self._parts.db.transaction() as tx:
                answer = await reading.ask(tx, request.what, arguments, call.who)
        except (TypeError, ValueError, psycopg.DataError, psycopg.ProgrammingError) as error:
            raise UsageError(f"{request.what!r} cannot be asked with that: {str(error)[:200]}") from error
        return pb.Answer(json=json.dumps(answer))

    async def do(self, request: pb.DoRequest, call: Call) -> pb.Answer:
        """Change."""
        call.admit(request.action)
        if len(request.arguments) > _MOST_ARGUMENTS:
            raise UsageError(f"{request.action!r} takes at most {_MOST_ARGUMENTS} characters")
        arguments = json_object(request.arguments, f"what {request.action!r} is called with")
        return pb.Answer(json=json.dumps(await self._deeds.do(request.action, arguments, call)))

    async def follow(self, request: pb.FollowRequest, call: Call) -> None:
        """Tell what happens."""
        if len(request.jobs) > MOST_NAMES:
            raise UsageError(f"at most {MOST_NAMES} names can be followed at a time", hint="name the submission")
        if not request.jobs:
            raise UsageError("which jobs are to be followed?")
        await Following(self._parts, call, logs=request.logs, after=request.after).run(list(request.jobs))

    async def lease(self, requests: AsyncIterator[pb.LeaseRequest], call: Call) -> None:
        """Hold a board."""
        await Holding(self._parts, call).run(requests)

    async def dial(self, requests: AsyncIterator[pb.Piece], call: Call) -> None:
        """A connection to the agent of a board that the caller holds."""
        parts, given = self._parts, call.metadata.get(LEASE_KEY, "")
        if not given.isdecimal() or len(given) > 18:
            raise UsageError(f"the metadata {LEASE_KEY} must be a lease's number, not {given[:50]!r}")
        lease = int(given)
        async with parts.db.transaction() as tx:
            held = await leases.renew_holder(tx, lease, call.metadata.get(LEASE_SECRET_KEY, ""), parts.terms)
            grant = await leases.grant_of(tx, lease) if held else None
        if grant is None:
            raise AccessRefused(f"lease {lease} is over, or the key that was shown is not its own")
        with parts.tunnels.opened(lease) as tunnel:
            if (owner := parts.dispatch.owner(grant.board)) is not None:
                owner.dial(tunnel.id, lease, "")
            else:
                said = {"board": grant.board, "lease": lease, "id": tunnel.id, "gateway": parts.advertise}
                async with parts.db.transaction() as tx:
                    await changes.tell(tx, {"kind": "dial", **said})
            await tunnel.serve(requests, call)

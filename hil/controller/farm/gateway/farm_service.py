"""The service ``Farm``: what users ask for and change.

What users and admins change with ``Do``, each deed with its row in the audit.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import psycopg

from hil.controller.farm import telemetry
from hil.controller.farm.gateway.calls import Call
from hil.controller.farm.gateway.context import GatewayContext
from hil.controller.farm.gateway.job_follower import MOST_NAMES, JobFollower
from hil.controller.farm.gateway.lease_holder import LeaseHolder
from hil.controller.farm.gateway.validation import json_object, order_of
from hil.controller.farm.messages import Priority, Role
from hil.controller.farm.rpc import LEASE_KEY, LEASE_SECRET_KEY
from hil.controller.farm.store import access as desk
from hil.controller.farm.store import boards, leases, notifications, queries, submissions, sweeper
from hil.controller.farm.store.database import Tx
from hil.errors import AccessRefused, UsageError
from hil.protocol.v1 import farm_pb2 as pb

_LOG = logging.getLogger("hil.farm.gateway")
# All of it goes into the audit.
_MOST_ARGUMENTS = 20_000


class FarmService:
    """Coroutines of the service's methods."""

    def __init__(self, parts: GatewayContext) -> None:
        self._parts = parts
        self._deeds = AdminActions(parts)

    async def submit(self, request: pb.SubmitRequest, call: Call) -> pb.SubmitReply:
        """Queue jobs, and give them boards at once where some are free."""
        parts, order = self._parts, order_of(request.order)
        trace = request.trace if len(request.trace) <= 100 and request.trace.isprintable() else ""
        with telemetry.span("submit", trace, user=call.who.user, title=order.title, jobs=len(order.specs)) as span:
            async with parts.db.transaction() as tx:
                done = await submissions.submit(tx, parts.engine, call.who, order, span.traceparent, parts.settings)
                said = {"title": order.title, "jobs": len(done.jobs), "selector": order.selector, "board": order.board}
                async with tx.pipeline():
                    await desk.note_audit(tx, call.who, call.name, str(done.submission), True, said)
                    granted = await leases.grants_of_submission(tx, done.submission, parts.settings)
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
                answer = await queries.ask(tx, request.what, arguments, call.who)
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
        await JobFollower(self._parts, call, logs=request.logs, after=request.after).run(list(request.jobs))

    async def lease(self, requests: AsyncIterator[pb.LeaseRequest], call: Call) -> None:
        """Hold a board."""
        await LeaseHolder(self._parts, call).run(requests)

    async def dial(self, requests: AsyncIterator[pb.Piece], call: Call) -> None:
        """A connection to the agent of a board that the caller holds."""
        parts, given = self._parts, call.metadata.get(LEASE_KEY, "")
        if not given.isdecimal() or len(given) > 18:
            raise UsageError(f"the metadata {LEASE_KEY} must be a lease's number, not {given[:50]!r}")
        lease = int(given)
        async with parts.db.transaction() as tx:
            held = await leases.renew_holder(tx, lease, call.metadata.get(LEASE_SECRET_KEY, ""), parts.settings)
            grant = await leases.grant_of(tx, lease) if held else None
        if grant is None:
            raise AccessRefused(f"lease {lease} is over, or the key that was shown is not its own")
        with parts.tunnels.opened(lease) as tunnel:
            if (owner := parts.dispatch.owner(grant.board)) is not None:
                owner.dial(tunnel.id, lease, "")
            else:
                said = {"board": grant.board, "lease": lease, "id": tunnel.id, "gateway": parts.advertise}
                async with parts.db.transaction() as tx:
                    await notifications.tell(tx, {"kind": "dial", **said})
            await tunnel.serve(requests, call)


_LOG = logging.getLogger("hil.farm.gateway")
_MOST_DAYS, _DAY_S = 3660, 86400.0


class AdminActions:
    """The actions by name; what each takes is checked here, who may do it in :mod:`.access`."""

    def __init__(self, parts: GatewayContext) -> None:
        self._parts = parts
        self._known = {
            "cancel": self._cancel,
            "priority": self._priority,
            "drain": self._drain,
            "resume": self._resume,
            "forget": self._forget,
            "token": self._token,
            "revoke": self._revoke,
            "gc": self._gc,
        }

    async def do(self, action: str, arguments: Mapping[str, Any], call: Call) -> Any:
        """Do it; returns what there is to tell, as JSON."""
        parts = self._parts
        async with parts.db.transaction() as tx:
            answer = await self._known[action](tx, arguments, call)
            said = {key: value for key, value in arguments.items() if key not in ("name", "user")}
            thing = str(arguments.get("name") or arguments.get("user") or "")
            await desk.note_audit(tx, call.who, f"{call.name} {action}", thing, True, said)
        parts.dispatch.poke()
        if action == "revoke":
            parts.access.forget()
        _LOG.info("done", extra={"action": action, "object": thing, "user": call.who.user})
        return answer

    async def _cancel(self, tx: Tx, arguments: Mapping[str, Any], call: Call) -> Any:
        name = _text(arguments, "name")
        return {"cancelled": await submissions.cancel(tx, self._parts.engine, call.who, name, self._parts.settings)}

    async def _priority(self, tx: Tx, arguments: Mapping[str, Any], call: Call) -> Any:
        try:
            priority = Priority(_text(arguments, "priority"))
        except ValueError as error:
            raise UsageError(f"a priority is {', '.join(one.value for one in Priority)}") from error
        return {"jobs": await submissions.prioritise(tx, call.who, _text(arguments, "name"), priority)}

    async def _drain(self, tx: Tx, arguments: Mapping[str, Any], call: Call) -> Any:
        await boards.drain(tx, call.who, _text(arguments, "name"), _text(arguments, "reason", ""))
        return {}

    async def _resume(self, tx: Tx, arguments: Mapping[str, Any], call: Call) -> Any:
        await boards.resume(tx, self._parts.engine, call.who, _text(arguments, "name"), self._parts.settings)
        return {}

    async def _forget(self, tx: Tx, arguments: Mapping[str, Any], call: Call) -> Any:
        return {"ended": await boards.forget(tx, call.who, _text(arguments, "name"), self._parts.settings)}

    async def _token(self, tx: Tx, arguments: Mapping[str, Any], call: Call) -> Any:
        """A new token: ``user``, ``role``, ``project``, ``note``, ``expires_s`` (0: never)."""
        try:
            role = Role(_text(arguments, "role"))
        except ValueError as error:
            roles = ", ".join(one.value for one in Role)
            raise UsageError(f"there is no role {str(arguments['role'])[:50]!r}", hint=f"one of {roles}") from error
        seconds = _number(arguments, "expires_s", 0, _MOST_DAYS * _DAY_S)
        until = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=seconds) if seconds else None
        project, note = _text(arguments, "project", ""), _text(arguments, "note", "")
        return {"token": await desk.add_token(tx, _text(arguments, "user"), role, project, note, until)}

    async def _revoke(self, tx: Tx, arguments: Mapping[str, Any], call: Call) -> Any:
        """The token ``id`` is good no more."""
        number = arguments.get("id")
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 1 << 62:
            raise UsageError(f"id must be a token's number, not {str(number)[:50]!r}", hint="hil farm token list")
        return {"user": await desk.revoke(tx, number)}

    async def _gc(self, tx: Tx, arguments: Mapping[str, Any], call: Call) -> Any:
        """Delete what is old: ``dry_run`` only counts, ``days`` is how long things are kept."""
        parts, dry_run = self._parts, arguments.get("dry_run", False)
        days = _number(arguments, "days", parts.settings.keep_days, _MOST_DAYS)
        if not isinstance(dry_run, bool):
            raise UsageError("dry_run must be true or false")

        async def delete(digests: list[str]) -> None:
            for digest in digests:
                await asyncio.to_thread(parts.store.delete, digest)

        if not dry_run:
            # In a transaction of its own, since nobody else can do anything until it is over; this one waits meanwhile.
            await tx.execute("set local idle_in_transaction_session_timeout = '1min'")
            async with parts.db.transaction() as own:
                await boards.forget_absent(own, days * _DAY_S, parts.settings)
        cleaned = await sweeper.gc(tx, days * _DAY_S, delete, dry_run=dry_run)
        if not dry_run:
            await asyncio.to_thread(parts.store.sweep, _DAY_S, time.time())
        return {"counts": cleaned.counts, "bytes": cleaned.bytes}


def _text(arguments: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = arguments.get(name, default)
    if not isinstance(value, str) or len(value) > 1000 or (default is None and not value):
        raise UsageError(f"{name} must be a text of at most 1000 characters" + ("" if value else ", and is missing"))
    return value


def _number(arguments: Mapping[str, Any], name: str, default: float, most: float) -> float:
    value = arguments.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise UsageError(f"{name} must be a number from 0 to {most:g}, not {str(value)[:50]!r}")
    return value

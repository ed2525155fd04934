"""The service ``Farm``: what users ask for and change."""

from __future__ import annotations

import asyncio
import datetime
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psycopg

from hil.controller.farm import telemetry
from hil.controller.farm.gateway.calls import Call
from hil.controller.farm.gateway.context import GatewayContext
from hil.controller.farm.gateway.job_follower import MOST_NAMES, JobFollower
from hil.controller.farm.gateway.lease_holder import LeaseHolder
from hil.controller.farm.gateway.validation import submission_of
from hil.controller.farm.messages import Priority, Role
from hil.controller.farm.rpc import LEASE_KEY, LEASE_SECRET_KEY, json_message
from hil.controller.farm.store import access, boards, leases, notifications, queries, submissions, sweeper
from hil.controller.farm.store.database import Tx
from hil.errors import AccessRefused, UsageError
from hil.protocol.v1 import farm_pb2 as pb

_LOG = logging.getLogger("hil.farm.gateway")
_MOST_DAYS, _DAY_S = 3660, 86400.0
# Most characters of a text of an action; all of them go into the audit.
_LONGEST_TEXT = 1000


class FarmService:
    """Coroutines of the service's methods."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._actions = AdminActions(context)

    async def submit(self, request: pb.SubmitRequest, call: Call) -> pb.SubmitReply:
        """Queue jobs, and give them boards at once if some are free."""
        context, wanted = self._context, submission_of(request.submission)
        trace = request.trace if len(request.trace) <= 100 and request.trace.isprintable() else ""
        with telemetry.span("submit", trace, user=call.who.user, title=wanted.title, jobs=len(wanted.specs)) as span:
            async with context.db.transaction() as tx:
                done = await submissions.submit(
                    tx, context.engine, call.who, wanted, span.traceparent, context.settings
                )
                said = {
                    "title": wanted.title,
                    "jobs": len(done.jobs),
                    "selector": wanted.selector,
                    "board": wanted.board,
                }
                await access.note_audit(tx, call.who, call.name, str(done.submission), True, said)
            context.dispatch.poke()
        _LOG.info("submitted", extra={"job": str(done.submission), "user": call.who.user, **said})
        return pb.SubmitReply(submission=done.submission, jobs=done.jobs)

    async def ask(self, request: pb.AskRequest, call: Call) -> pb.Answer:
        """Answer a question."""
        what = request.WhichOneof("question") or "nothing"
        call.admit(what)
        try:
            async with self._context.db.transaction() as tx:
                answer = await queries.ask(tx, what, _fields(getattr(request, what)), self._context.settings)
        except psycopg.DataError as error:
            raise UsageError(f"{what!r} cannot be asked with that: {str(error)[:200]}") from error
        return pb.Answer(answer=json_message(answer))

    async def do(self, request: pb.DoRequest, call: Call) -> pb.Answer:
        """Change something."""
        action = request.WhichOneof("action") or "nothing"
        call.admit(action)
        return pb.Answer(answer=json_message(await self._actions.do(action, getattr(request, action), call)))

    async def follow(self, request: pb.FollowRequest, call: Call) -> None:
        """Stream what happens to jobs."""
        if len(request.jobs) > MOST_NAMES:
            raise UsageError(f"at most {MOST_NAMES} names can be followed at a time", hint="name the submission")
        if not request.jobs:
            raise UsageError("which jobs are to be followed?")
        await JobFollower(self._context, call, logs=request.logs, after=request.after).run(list(request.jobs))

    async def lease(self, requests: AsyncIterator[pb.LeaseRequest], call: Call) -> None:
        """Hold a board for the caller."""
        await LeaseHolder(self._context, call).run(requests)

    async def dial(self, requests: AsyncIterator[pb.Piece], call: Call) -> None:
        """Connect the caller to the agent of a board that it holds."""
        context, given = self._context, call.metadata.get(LEASE_KEY, "")
        if not given.isdecimal() or len(given) > 18:
            raise UsageError(f"the metadata {LEASE_KEY} must be a lease's number, not {given[:50]!r}")
        lease = int(given)
        async with context.db.transaction() as tx:
            held = await leases.renew_holder(tx, lease, call.metadata.get(LEASE_SECRET_KEY, ""), context.settings)
            grant = await leases.grant_of(tx, lease) if held else None
        if grant is None:
            raise AccessRefused(f"lease {lease} is over, or the key that was shown is not its own")
        with context.tunnels.opened(lease) as tunnel:
            if (owner := context.dispatch.owner(grant.board)) is not None:
                owner.dial(tunnel.id, lease, "")
            else:
                where = {"board": grant.board, "lease": lease, "id": tunnel.id, "gateway": context.advertise}
                async with context.db.transaction() as tx:
                    await notifications.tell(tx, {"kind": "dial", **where})
            await tunnel.serve(requests, call)


class AdminActions:
    """What ``Do`` changes. Each action leaves a row in the audit; :mod:`.access` says who may do which."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._known: dict[str, Callable[[Tx, Any, Call], Awaitable[Any]]] = {
            "cancel": self._cancel,
            "priority": self._priority,
            "drain": self._drain,
            "resume": self._resume,
            "forget": self._forget,
            "token": self._token,
            "revoke": self._revoke,
            "gc": self._gc,
        }

    async def do(self, action: str, request: Any, call: Call) -> Any:
        """Do an action.

        Args:
            action: its name in ``DoRequest``.
            request: the message of that field.
            call: who does it.

        Returns:
            What there is to tell, as JSON values.
        """
        context, arguments = self._context, _fields(request)
        async with context.db.transaction() as tx:
            answer = await self._known[action](tx, request, call)
            detail = {key: value for key, value in arguments.items() if key not in ("name", "user")}
            thing = str(arguments.get("name") or arguments.get("user") or "")
            await access.note_audit(tx, call.who, f"{call.name} {action}", thing, True, detail)
        context.dispatch.poke()
        if action == "revoke":
            context.access.forget()
        _LOG.info("done", extra={"action": action, "object": thing, "user": call.who.user})
        return answer

    async def _cancel(self, tx: Tx, request: pb.NameQuestion, call: Call) -> Any:
        context = self._context
        name = _text(request, "name")
        return {"cancelled": await submissions.cancel(tx, context.engine, call.who, name, context.settings)}

    async def _priority(self, tx: Tx, request: pb.PriorityAction, call: Call) -> Any:
        try:
            priority = Priority(request.priority)
        except ValueError as error:
            raise UsageError(f"a priority is {', '.join(one.value for one in Priority)}") from error
        return {"jobs": await submissions.prioritise(tx, call.who, _text(request, "name"), priority)}

    async def _drain(self, tx: Tx, request: pb.DrainAction, call: Call) -> Any:
        await boards.drain(tx, call.who, _text(request, "name"), _text(request, "reason", optional=True))
        return {}

    async def _resume(self, tx: Tx, request: pb.NameQuestion, call: Call) -> Any:
        await boards.resume(tx, self._context.engine, call.who, _text(request, "name"), self._context.settings)
        return {}

    async def _forget(self, tx: Tx, request: pb.NameQuestion, call: Call) -> Any:
        return {"ended": await boards.forget(tx, call.who, _text(request, "name"), self._context.settings)}

    async def _token(self, tx: Tx, request: pb.TokenAction, call: Call) -> Any:
        try:
            role = Role(request.role)
        except ValueError as error:
            roles = ", ".join(one.value for one in Role)
            raise UsageError(f"there is no role {request.role[:50]!r}", hint=f"one of {roles}") from error
        seconds = _number("expires_s", request.expires_s, _MOST_DAYS * _DAY_S)
        until = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=seconds) if seconds else None
        project, note = (_text(request, name, optional=True) for name in ("project", "note"))
        return {"token": await access.add_token(tx, _text(request, "user"), role, project, note, until)}

    async def _revoke(self, tx: Tx, request: pb.RevokeAction, call: Call) -> Any:
        if not 0 < request.id < 1 << 62:
            raise UsageError(f"id must be a token's number, not {request.id}", hint="hil farm token list")
        return {"user": await access.revoke(tx, request.id)}

    async def _gc(self, tx: Tx, request: pb.GcAction, call: Call) -> Any:
        context, dry_run = self._context, request.dry_run
        days = _number("days", request.days if request.HasField("days") else context.settings.keep_days, _MOST_DAYS)

        async def delete(digests: list[str]) -> None:
            for digest in digests:
                await asyncio.to_thread(context.store.delete, digest)

        if not dry_run:
            # In a transaction of its own, since nobody else can do anything until it is over; this one waits meanwhile.
            await tx.execute("set local idle_in_transaction_session_timeout = '1min'")
            async with context.db.transaction() as own:
                await boards.forget_absent(own, days * _DAY_S, context.settings)
        cleaned = await sweeper.gc(tx, days * _DAY_S, delete, dry_run=dry_run)
        if not dry_run:
            await asyncio.to_thread(context.store.sweep, _DAY_S, time.time())
        return {"counts": cleaned.counts, "bytes": cleaned.bytes}


def _fields(message: Any) -> dict[str, Any]:
    """Return the fields of a flat message; of those that may be unset only the ones that are set."""
    found = {}
    for field in message.DESCRIPTOR.fields:
        if not field.has_presence or message.HasField(field.name):
            value = getattr(message, field.name)
            found[field.name] = value if isinstance(value, (str, bool, int, float)) else list(value)
    return found


def _text(request: Any, name: str, *, optional: bool = False) -> str:
    value: str = getattr(request, name)
    if len(value) > _LONGEST_TEXT or (not value and not optional):
        missing = "" if value else ", and is missing"
        raise UsageError(f"{name} must be a text of at most {_LONGEST_TEXT} characters{missing}")
    return value


def _number(name: str, value: float, most: float) -> float:
    if not (math.isfinite(value) and 0 <= value <= most):
        raise UsageError(f"{name} must be a number from 0 to {most:g}, not {value}")
    return value

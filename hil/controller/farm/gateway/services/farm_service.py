"""Service ``Farm``: queries and actions of users."""

from __future__ import annotations

import asyncio
import datetime
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import psycopg

from hil.controller.farm import telemetry
from hil.controller.farm.database import notifications
from hil.controller.farm.database.database import Tx
from hil.controller.farm.database.notifications import Change, drain_queue
from hil.controller.farm.gateway.calls import NOTHING, GatewayCall
from hil.controller.farm.gateway.context import GatewayContext
from hil.controller.farm.gateway.services.lease_holder import LeaseHolder, list_more_boards
from hil.controller.farm.gateway.services.power_service import switch_power, write_image
from hil.controller.farm.job_files import KEEP_PROGRAMS
from hil.controller.farm.leasing import boards, leases, reservations, submissions, sweeper
from hil.controller.farm.messages import ENDED, BoardAccess, Priority, Right, Role, parse_job
from hil.controller.farm.rpc import (
    CONSOLE_KEY,
    LEASE_KEY,
    LEASE_SECRET_KEY,
    decode_submission,
    encode_json,
    encode_status,
)
from hil.controller.farm.store import access, event_log, queries
from hil.controller.farm.store.board_access import check_board_access
from hil.controller.farm.store.queries import blocked, unrunnable
from hil.controller.farm.store.records import JOBS, NAME, fetch_rows
from hil.controller.records.lab.farm import (
    CancelledJobs,
    CancelledReservation,
    CleanedFarm,
    EmptyReply,
    FarmJob,
    ForgottenBoard,
    NewToken,
    RevokedToken,
)
from hil.errors import AccessRefused, UsageError, did_you_mean
from hil.protocol.v1 import farm_pb2 as pb

E = TypeVar("E", Priority, Right, Role)

_LOG = logging.getLogger("hil.farm.gateway")
_MOST_DAYS, _DAY_S = 3660, 86400.0
# Maximum length of a text argument in characters. The audit stores the complete text.
_MAX_TEXT_LENGTH = 1000


class FarmService:
    """Methods of the service."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._actions = AdminActions(context)

    async def submit(self, request: pb.SubmitRequest, call: GatewayCall) -> pb.SubmitReply:
        """Queue jobs, and assign free boards."""
        context, wanted = self._context, decode_submission(request.submission)
        if context.keeps_programs:
            specs = (spec.replace(options={**spec.options, KEEP_PROGRAMS: True}) for spec in wanted.specs)
            wanted = replace(wanted, specs=tuple(specs))
        trace = request.trace if len(request.trace) <= 100 and request.trace.isprintable() else ""
        with telemetry.record_span(
            "submit", trace, user=call.who.user, title=wanted.title, jobs=len(wanted.specs)
        ) as span:
            async with context.db.transaction() as tx:
                done = await submissions.submit(
                    tx, context.engine, call.who, wanted, span.traceparent, context.settings
                )
                same = {name: getattr(wanted, name) for name in ("title", "selector", "board")}
                fields = {**same, "jobs": len(done.jobs), **list_more_boards(wanted)}
                await access.note_audit(tx, call.who, call.name, str(done.submission), True, fields)
            context.dispatch.trigger_check()
        _LOG.info("submitted", extra={"job": str(done.submission), "user": call.who.user, **fields})
        return pb.SubmitReply(submission=done.submission, jobs=done.jobs)

    async def ask(self, request: pb.AskRequest, call: GatewayCall) -> pb.Answer:
        """Run a query."""
        what = request.WhichOneof("question") or NOTHING
        call.check_permission(what)
        try:
            async with self._context.db.transaction() as tx:
                answer = await queries.ask(
                    tx,
                    what,
                    _read_fields(getattr(request, what)),
                    self._context.settings,
                    call.who,
                    self._context.webhooks.webhooks,
                )
        except psycopg.DataError as error:
            raise UsageError(f"invalid arguments for {what!r}: {str(error)[:200]}") from error
        return pb.Answer(answer=encode_json(msgspec.to_builtins(answer)))

    async def do(self, request: pb.DoRequest, call: GatewayCall) -> pb.Answer:
        """Run an action."""
        action = request.WhichOneof("action") or NOTHING
        call.check_permission(action)
        answer = await self._actions.do(action, getattr(request, action), call)
        return pb.Answer(answer=encode_json(msgspec.to_builtins(answer)))

    async def follow(self, request: pb.FollowRequest, call: GatewayCall) -> None:
        """Stream the states and logs of jobs."""
        if len(request.jobs) > MAX_NAMES:
            raise UsageError(f"at most {MAX_NAMES} names can be followed per call", hint="use the submission's name")
        if not request.jobs:
            raise UsageError("missing names of jobs to follow")
        await JobFollower(self._context, call, logs=request.logs, after=request.after).run(list(request.jobs))

    async def lease(self, requests: AsyncIterator[pb.LeaseRequest], call: GatewayCall) -> None:
        """Lease a board to the caller."""
        await LeaseHolder(self._context, call).run(requests)

    async def dial(self, requests: AsyncIterator[pb.Piece], call: GatewayCall) -> None:
        """Connect the caller to the agent of a board that the caller leases, or to the console of a board.

        Without a lease, the console is read-only.
        """
        context, given = self._context, call.metadata.get(LEASE_KEY, "")
        if (name := call.metadata.get(CONSOLE_KEY, "")) and not given:
            call.check_permission("console")
            async with context.db.transaction() as tx:
                open_to = {one.name: one.access for one in await queries.boards(tx)}.get(name)
            if open_to is None:
                raise UsageError(f"board {name[:100]!r} not found on the farm", hint="list all boards: hil farm boards")
            check_board_access(call.who, name, BoardAccess(tuple(open_to.users), tuple(open_to.groups)))
            await self._connect_worker(requests, call, name, 0, console=True)
            return
        if not given.isdecimal() or len(given) > 18:
            raise UsageError(f"metadata {LEASE_KEY} must be a lease number, got {given[:50]!r}")
        lease = int(given)
        async with context.db.transaction() as tx:
            held = await leases.renew_holder(tx, lease, call.metadata.get(LEASE_SECRET_KEY, ""), context.settings)
            grant = await leases.read_grant(tx, lease, context.settings) if held else None
        if grant is None:
            raise AccessRefused(f"lease {lease} has ended, or the key is invalid")
        if name and name != grant.board:
            raise UsageError(f"lease {lease} is for board {grant.board}, not {name[:100]!r}")
        await self._connect_worker(requests, call, grant.board, lease, console=bool(name))

    async def _connect_worker(
        self, requests: AsyncIterator[pb.Piece], call: GatewayCall, board: str, lease: int, *, console: bool
    ) -> None:
        """Ask a board's worker to accept a connection, and copy data in both directions."""
        context = self._context
        with context.tunnels.open_tunnel(lease) as tunnel:
            if (owner := context.dispatch.find_owner(board)) is not None:
                owner.request_dial(tunnel.id, lease, "", console=console)
            else:
                where: dict[str, Any] = {"board": board, "lease": lease, "id": tunnel.id}
                where |= {"gateway": context.advertise, "console": console}
                async with context.db.transaction() as tx:
                    await notifications.publish_change(tx, {"kind": "dial", **where})
            await tunnel.serve(requests, call)


class AdminActions:
    """Actions of the method ``Do``. Each action is recorded in the audit; :mod:`.calls` defines the required roles."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._known: dict[str, Callable[[Tx, Any, GatewayCall], Awaitable[Any]]] = {
            "cancel": self._cancel_jobs,
            "priority": self._set_priority,
            "drain": self._drain_board,
            "resume": self._resume_board,
            "forget": self._forget_board,
            "token": self._add_token,
            "revoke": self._revoke_token,
            "gc": self._collect_garbage,
            "reserve": self._reserve_board,
            "unreserve": self._cancel_reservation,
        }
        # Actions that take longer than a transaction. They write the audit themselves.
        self._long: dict[str, Callable[[Any, GatewayCall], Awaitable[Any]]] = {
            "power": self._switch_power,
            "provision": self._write_image,
            "webhook": self._test_webhook,
        }

    async def do(self, action: str, request: Any, call: GatewayCall) -> Any:
        """Run an action in a transaction, and record the action in the audit."""
        if action in self._long:
            return await self._long[action](request, call)
        context, arguments = self._context, _read_fields(request)
        async with context.db.transaction() as tx:
            answer = await self._known[action](tx, request, call)
            detail = {key: value for key, value in arguments.items() if key not in ("name", "user")}
            thing = str(arguments.get("name") or arguments.get("user") or "")
            await access.note_audit(tx, call.who, f"{call.name} {action}", thing, True, detail)
        context.dispatch.trigger_check()
        if action == "revoke":
            context.access.forget()
        _LOG.info("done", extra={"action": action, "object": thing, "user": call.who.user})
        return answer

    async def _cancel_jobs(self, tx: Tx, request: pb.NameQuestion, call: GatewayCall) -> Any:
        name, context = _read_text(request, "name"), self._context
        return CancelledJobs(cancelled=await submissions.cancel(tx, context.engine, call.who, name, context.settings))

    async def _set_priority(self, tx: Tx, request: pb.PriorityAction, call: GatewayCall) -> Any:
        priority = _parse_choice(Priority, "priority", request.priority)
        return {"jobs": await submissions.set_priority(tx, call.who, _read_text(request, "name"), priority)}

    async def _drain_board(self, tx: Tx, request: pb.DrainAction, call: GatewayCall) -> Any:
        await boards.drain_board(
            tx, call.who, _read_text(request, "name"), _read_text(request, "reason", optional=True)
        )
        return EmptyReply()

    async def _resume_board(self, tx: Tx, request: pb.NameQuestion, call: GatewayCall) -> Any:
        await boards.resume(tx, self._context.engine, call.who, _read_text(request, "name"), self._context.settings)
        return EmptyReply()

    async def _forget_board(self, tx: Tx, request: pb.NameQuestion, call: GatewayCall) -> Any:
        name = _read_text(request, "name")
        return ForgottenBoard(ended=await boards.forget(tx, call.who, name, self._context.settings))

    async def _switch_power(self, request: pb.PowerAction, call: GatewayCall) -> Any:
        name, action = _read_text(request, "name"), _read_text(request, "switch")
        return await switch_power(self._context, call, name, action, detach=request.detach)

    async def _write_image(self, request: pb.ProvisionAction, call: GatewayCall) -> Any:
        name, file, image = (_read_text(request, key) for key in ("name", "file", "image"))
        return await write_image(self._context, call, name, file, image)

    async def _test_webhook(self, request: pb.WebhookAction, call: GatewayCall) -> Any:
        name, context = _read_text(request, "name"), self._context
        tested = await context.webhooks.send_test(name)
        async with context.db.transaction() as tx:
            await access.note_audit(tx, call.who, f"{call.name} webhook", name, True, {"status": tested.status})
        return tested

    async def _reserve_board(self, tx: Tx, request: pb.ReserveAction, call: GatewayCall) -> Any:
        selector = _read_text(request, "selector", optional=True)
        return await reservations.reserve(
            tx, call.who, selector, request.begin, request.seconds, self._context.settings
        )

    async def _cancel_reservation(self, tx: Tx, request: pb.ReservationAction, call: GatewayCall) -> Any:
        if not 0 < request.id < 1 << 62:
            raise UsageError(f"id must be a reservation's number, got {request.id}", hint="hil farm reservations")
        return CancelledReservation(board=await reservations.cancel_reservation(tx, call.who, request.id))

    async def _add_token(self, tx: Tx, request: pb.TokenAction, call: GatewayCall) -> Any:
        role = _parse_choice(Role, "role", request.role)
        seconds = _check_number("expires_s", request.expires_s, _MOST_DAYS * _DAY_S)
        until = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=seconds) if seconds else None
        project, note = (_read_text(request, name, optional=True) for name in ("project", "note"))
        user = _read_text(request, "user")
        rights = {_parse_choice(Right, "right", right) for right in request.rights}
        groups = list(request.groups)
        return NewToken(token=await access.add_token(tx, user, role, project, note, until, rights, groups))

    async def _revoke_token(self, tx: Tx, request: pb.RevokeAction, call: GatewayCall) -> Any:
        if not 0 < request.id < 1 << 62:
            raise UsageError(f"id must be a token number, got {request.id}", hint="hil farm token list")
        return RevokedToken(user=await access.revoke(tx, request.id))

    async def _collect_garbage(self, tx: Tx, request: pb.GcAction, call: GatewayCall) -> Any:
        context, dry_run = self._context, request.dry_run
        days = _check_number(
            "days", request.days if request.HasField("days") else context.settings.keep_days, _MOST_DAYS
        )

        async def delete(digests: list[str]) -> None:
            for digest in digests:
                await asyncio.to_thread(context.store.delete, digest)

        if not dry_run:
            # Forget boards in a separate short transaction, because forgetting boards blocks all other writers. The
            # current transaction is idle in the meantime.
            await tx.execute("set local idle_in_transaction_session_timeout = '1min'")
            async with context.db.transaction() as own:
                await boards.forget_absent(own, days * _DAY_S, context.settings)
        cleaned = await sweeper.delete_old(tx, days * _DAY_S, delete, dry_run=dry_run)
        if not dry_run:
            await asyncio.to_thread(context.store.sweep, _DAY_S, time.time())
        return CleanedFarm(counts=cleaned.counts, bytes=cleaned.bytes)


def _parse_choice(kind: type[E], what: str, value: str) -> E:
    try:
        return kind(value)
    except ValueError as error:
        known = [one.value for one in kind]
        hint = f"{did_you_mean(value[:50], known)}expected one of {', '.join(known)}"
        raise UsageError(f"unknown {what} {value[:50]!r}", hint=hint) from error


def _read_fields(message: Any) -> dict[str, Any]:
    """Return the fields of a flat message, without unset optional fields."""
    found = {}
    for field in message.DESCRIPTOR.fields:
        if not field.has_presence or message.HasField(field.name):
            value = getattr(message, field.name)
            found[field.name] = value if isinstance(value, (str, bool, int, float)) else list(value)
    return found


def _read_text(request: Any, name: str, *, optional: bool = False) -> str:
    value: str = getattr(request, name)
    if len(value) > _MAX_TEXT_LENGTH or (not value and not optional):
        missing = "" if value else ", not empty"
        raise UsageError(f"{name} must be a string of at most {_MAX_TEXT_LENGTH} characters{missing}")
    return value


def _check_number(name: str, value: float, most: float) -> float:
    if not (math.isfinite(value) and 0 <= value <= most):
        raise UsageError(f"{name} must be a number from 0 to {most:g}, got {value}")
    return value


MAX_NAMES = 1000
# Same limit as for a submission.
_MAX_JOBS = 100_000
# Poll interval, in case a notification is lost.
_LOOK_SECONDS = 5.0
_GATHER_S, _LATE_S = 0.05, 0.2
# If at most this many jobs changed, read each job separately. Otherwise, read whole submissions.
_FEW = 16


class JobFollower:
    """Stream of the states and logs of some jobs. ``after`` is the number of the last log line that the client has."""

    def __init__(self, context: GatewayContext, call: GatewayCall, *, logs: bool, after: int) -> None:
        self._context, self._call, self._logs, self._after = context, call, logs, after
        self._names: dict[int, str] = {}
        self._told: dict[str, pb.JobStatus] = {}
        self._open: set[str] = set()

    async def run(self, names: Collection[str]) -> None:
        """Stream while any job is active."""
        with self._context.pubsub.subscribe() as queue:
            async with self._context.db.transaction() as tx:
                await self._find_jobs(tx, names)
            self._open = set(self._names.values())
            await self._send_updates(None)
            loop = asyncio.get_running_loop()
            looked = whole = loop.time()
            while self._open:
                # Process bursts of changes together.
                await asyncio.sleep(looked + _GATHER_S - loop.time())
                changes, looked = await drain_queue(queue, _LOOK_SECONDS), loop.time()
                await self._call.recheck_token()
                touched = self._find_changed_jobs(changes)
                # Poll board states, which change often but rarely affect a job.
                if looked - whole >= _LOOK_SECONDS:
                    touched = None
                whole = looked if touched is None else whole
                if touched is None or touched:
                    await self._send_updates(touched)
                if touched is None:
                    await self._call.send(pb.FollowReply())  # keepalive
            if self._logs:
                # A job's last output is stored separately from the result, and may arrive a little later.
                await asyncio.sleep(_LATE_S)
                await self._send_updates(set())

    def _find_changed_jobs(self, changes: list[Change]) -> set[str] | None:
        """Return the names of changed jobs; "" stands for log output. None means that all jobs must be read."""
        if not changes or any(change["kind"] == "again" for change in changes):
            return None
        touched = set()
        for change in changes:
            if change["kind"] == "job" and change["job"] in self._names:
                touched.add(self._names[change["job"]])
            elif change["kind"] == "log" and self._logs and change["job"] in self._names:
                touched.add("")
        return touched

    async def _find_jobs(self, tx: Tx, names: Collection[str]) -> None:
        """Find the requested jobs. A submission's name selects all its jobs."""
        wanted = {(*parse_job(name), name) for name in names}
        query = f"select job.id, job.submission, job.number, {NAME} as name from {JOBS} where job.submission = any(%s)"
        rows = await fetch_rows(tx, query, [list({submission for submission, _, _ in wanted})])
        for submission, number, name in wanted:
            found = [row for row in rows if row["submission"] == submission and number in (None, row["number"])]
            if not found:
                raise UsageError(f"job {name} not found", hint="hil farm status lists all jobs; old jobs are deleted")
            if len(self._names) + len(found) > _MAX_JOBS:
                raise UsageError(f"at most {_MAX_JOBS} jobs can be followed per call")
            self._names |= {row["id"]: row["name"] for row in found}

    async def _send_updates(self, touched: set[str] | None) -> None:
        """Read changed jobs and send updates.

        Reads states before logs, so that clients receive the output before the end of the job.
        """
        async with self._context.db.transaction() as tx:
            found = await self._read_jobs(tx, touched)
            hopeless = await unrunnable(tx, found)
            waiting = await blocked(tx, found, self._context.settings)
            printed = await event_log.read_output_after(tx, list(self._names), self._after) if self._logs else []
        while printed:
            for row in printed:
                self._after = row.number
                await self._call.send(pb.FollowReply(log=pb.LogText(**msgspec.structs.asdict(row))))
            async with self._context.db.transaction() as tx:
                printed = await event_log.read_output_after(tx, list(self._names), self._after)
        for job in found:
            name = job.name
            status = encode_status(job, unrunnable=hopeless.get(name, ""), blocked=waiting.get(name, ""))
            if self._told.get(name) != status:
                self._told[name] = status
                await self._call.send(pb.FollowReply(job=status))
            if job.state in ENDED:
                self._open.discard(name)

    async def _read_jobs(self, tx: Tx, touched: set[str] | None) -> list[FarmJob]:
        named = self._open if touched is None else touched & self._open
        if len(named) <= _FEW:
            return [await queries.job(tx, name) for name in sorted(named)]
        found: list[FarmJob] = []
        for submission in sorted({parse_job(name)[0] for name in named}):
            jobs = await queries.jobs(tx, submission=submission, limit=_MAX_JOBS)
            found += [job for job in jobs if job.name in named]
        return found

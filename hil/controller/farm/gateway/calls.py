"""Common layer of all gateway calls: authentication, permissions, error conversion and audit of refusals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from hil import errors
from hil.controller.farm.database.database import Database, DatabaseAway, end_tasks
from hil.controller.farm.gateway.metrics import Metrics
from hil.controller.farm.messages import Principal, Role
from hil.controller.farm.oidc.token_verifier import TokenRejected, TokenVerifier
from hil.controller.farm.rpc import iter_methods
from hil.controller.farm.store import access as tokens
from hil.protocol import wire, wire_errors
from hil.protocol.bounded_message import MAX_FARM_FIELDS, parse_message
from hil.protocol.versions import FARM_KEY, check_farm_caller

_LOG = logging.getLogger("hil.farm.gateway")
_RECHECK_S, _BROKEN_S = 2.0, 0.1
# Maximum concurrent calls per user, and timeout in seconds for receiving a unary request. The limit does not apply to
# hosts, because each board has a stream.
_MOST_OF_USER, _REQUEST_S = 1000, 60.0


class GatewayCall:
    """Call in progress: method (``Farm.Submit``), caller, and stream to the caller."""

    def __init__(self, name: str, who: Principal, context: Any, access: Authenticator) -> None:
        self.name, self.who = name, who
        self.doing = name
        self.leaving = False
        self._broken = False
        self.metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        self._context, self._access = context, access
        self._checked = time.monotonic()

    async def send(self, message: Any) -> None:
        """Send a message to the caller. Waits while the caller does not read."""
        await self._context.write(message)

    async def has_ended_requests(self) -> bool:
        """Return True if the caller ended the requests on purpose.

        A broken connection also ends the requests, and cancels the call a moment later. So this method first waits
        briefly for a cancellation.
        """
        await asyncio.sleep(_BROKEN_S)
        return not self._broken

    def mark_cancelled(self) -> None:
        """Mark the call as cancelled. The serving task may notice the cancellation later (see ``end_tasks``)."""
        self._broken = True

    def check_permission(self, what: str) -> None:
        """Check the permission for a query or an action, and append its name to the call's name in the audit."""
        self.doing = f"{self.name} {what[:50]}"
        check_admission(self.who, self.name, what)

    async def recheck_token(self) -> None:
        """Check a stream's token every few seconds."""
        if time.monotonic() - self._checked > _RECHECK_S:
            self._checked = time.monotonic()
            # While the database is unavailable, the stream continues.
            with contextlib.suppress(DatabaseAway):
                self.who = await self._access.authenticate(self._context, is_running=True)
                check_admission(self.who, self.name)


class HandlerFactory:
    """Factory of gRPC handlers. A service is an object with a coroutine per method, named in lower case."""

    def __init__(self, access: Authenticator, metrics: Metrics) -> None:
        self._access, self._metrics = access, metrics
        self._stopping = asyncio.Event()
        self._open: Counter[str] = Counter()

    def stop(self) -> None:
        """End every stream with UNAVAILABLE, so that callers reconnect to other gateways."""
        self._stopping.set()

    def make_handlers(self, service: str, servicer: object) -> grpc.GenericRpcHandler:
        """Return the handler of a service."""
        table = {}
        for name, _, kind, asked, _ in iter_methods(service):
            # Read a unary request as a stream of length one, so that the caller is authenticated before the request is
            # read.
            make = getattr(grpc, f"stream_{kind.rpartition('_')[2]}_rpc_method_handler")
            serve = self._make_handler(f"{service}.{name}", getattr(servicer, name.lower()), kind)
            table[name] = make(
                serve,
                request_deserializer=_make_decoder(asked),
                response_serializer=lambda sent: sent.SerializeToString(),
            )
        return grpc.method_handlers_generic_handler(f"{wire.PACKAGE}.{service}", table)

    def _make_handler(
        self, name: str, behaviour: Callable[..., Awaitable[Any]], kind: str
    ) -> Callable[..., Awaitable[Any]]:
        streams_in = kind.startswith("stream")

        async def serve(requests: Any, context: Any) -> Any:
            began, code = time.perf_counter(), "OK"
            call: GatewayCall | None = None
            try:
                call = GatewayCall(name, await self._access.authenticate(context), context, self._access)
                check_farm_caller(call.metadata.get(FARM_KEY, ""))
                check_admission(call.who, name)
                with self._count_call(call):
                    asked = _check_requests(requests) if streams_in else await _read_unary_request(requests)
                    if kind == "unary_unary":
                        return await behaviour(asked, call)
                    return await self._serve_stream(behaviour, asked, call)
            except asyncio.CancelledError:
                code = "CANCELLED"
                raise
            except Exception as error:
                if isinstance(error, errors.AccessRefused):
                    who, doing = (call.who, call.doing) if call else (_make_anonymous_caller(context), name)
                    await self._access.record_refusal(who, doing, error.message)
                code = await _abort_call(name, error, context)
            finally:
                # Do not measure streams: the caller determines their duration.
                self._metrics.count_call(name, code, time.perf_counter() - began if kind == "unary_unary" else None)

        return serve

    @contextlib.contextmanager
    def _count_call(self, call: GatewayCall) -> Iterator[None]:
        """Count a call against the user's limit."""
        user = call.who.user
        if self._open[user] >= _MOST_OF_USER and not call.name.startswith("Hosts."):
            raise errors.FarmError(
                f"{user} already has {_MOST_OF_USER} open calls at this gateway", hint="close some of the calls"
            )
        self._open[user] += 1
        try:
            yield
        finally:
            self._open[user] -= 1
            if not self._open[user]:
                del self._open[user]

    async def _serve_stream(self, behaviour: Callable[..., Awaitable[Any]], request: Any, call: GatewayCall) -> Any:
        """Serve a stream. A shutdown of this gateway ends the stream."""
        work = asyncio.ensure_future(behaviour(request, call))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            call.leaving = True
            raise Leaving
        except asyncio.CancelledError:
            call.mark_cancelled()
            raise
        finally:
            # Ignore the result: the call has ended.
            await end_tasks(work, stopping)


class Leaving(errors.FarmUnreachable):
    """the gateway is shutting down; retry to reach another gateway"""


def _make_decoder(kind: Any) -> Callable[[bytes], Any]:
    """Return a decoder that returns None for invalid bytes.

    The handler then reports the invalid message, and the stream continues.
    """

    def decode(raw: bytes) -> Any:
        with contextlib.suppress(DecodeError):
            return parse_message(kind, raw, MAX_FARM_FIELDS)
        return None

    return decode


def _require_valid(request: Any) -> Any:
    if request is None:
        raise errors.UsageError("invalid request: not a message of this protocol")
    return request


async def _read_unary_request(requests: Any) -> Any:
    """Return the message of a unary request."""
    try:
        return _require_valid(await asyncio.wait_for(anext(aiter(requests), None), _REQUEST_S))
    except (TimeoutError, asyncio.TimeoutError):
        raise errors.UsageError(f"no request received within {_REQUEST_S:g} s") from None


async def _check_requests(requests: Any) -> AsyncIterator[Any]:
    async for request in requests:
        yield _require_valid(request)


async def _abort_call(name: str, error: Exception, context: Any) -> str:
    """End a call with the gRPC status of an error. Returns the name of the status."""
    trailing: tuple[tuple[str, bytes], ...] = ()
    if isinstance(error, Unauthenticated):
        code = grpc.StatusCode.UNAUTHENTICATED
    else:
        if not isinstance(error, errors.HilError):
            _LOG.error("call.failed", exc_info=error, extra={"call": name})
            error = errors.FarmError(f"the gateway failed: {type(error).__name__}", hint="see the gateway's log")
        code = choose_status(error)
        trailing = ((wire_errors.ERROR_KEY, wire_errors.to_message(error).SerializeToString()),)
    with contextlib.suppress(grpc.aio.AbortError):
        await context.abort(code, wire_errors.format_status(error), trailing)
    return str(code.name)


def choose_status(error: errors.HilError) -> grpc.StatusCode:
    """Return the gRPC status for an error. Callers retry on UNAVAILABLE."""
    if isinstance(error, (DatabaseAway, errors.FarmUnreachable)):
        return grpc.StatusCode.UNAVAILABLE
    if isinstance(error, errors.AccessRefused):
        return grpc.StatusCode.PERMISSION_DENIED
    if isinstance(error, errors.UsageError):
        return grpc.StatusCode.INVALID_ARGUMENT
    return grpc.StatusCode.FAILED_PRECONDITION


# Name of a query or action that this gateway does not know.
NOTHING = "nothing"
# Role -> calls that require at least this role. An entry may contain the name of a query or action. Calls that are not
# listed are refused.
_MAY: Mapping[Role, tuple[str, ...]] = {
    Role.VIEWER: (
        *("Farm.Follow", "Artifacts.Download", "Farm.Ask", "Farm.Ask jobs", "Farm.Ask job", "Farm.Ask result"),
        *("Farm.Ask logs", "Farm.Ask boards", "Farm.Ask events", "Farm.Ask stats", "Farm.Ask me", "Farm.Ask queue"),
        *("Farm.Ask cases", "Farm.Ask reservations", "Farm.Ask access", "Farm.Do"),  # each action has a separate entry
    ),
    Role.SUBMITTER: (
        *("Farm.Submit", "Farm.Do cancel", "Farm.Do priority", "Farm.Do power", "Farm.Lease", "Farm.Dial"),
        *("Farm.Dial console", "Farm.Do reserve", "Farm.Do unreserve", "Farm.Do provision"),
        *("Artifacts.Lacks", "Artifacts.Upload"),
    ),
    Role.HOST: ("Hosts.Attend", "Hosts.Report", "Hosts.Accept"),
    Role.ADMIN: (
        *("Farm.Ask audit", "Farm.Ask tokens", "Farm.Do drain", "Farm.Do resume", "Farm.Do forget"),
        *("Farm.Do token", "Farm.Do revoke", "Farm.Do gc", "Farm.Ask webhooks", "Farm.Do webhook"),
    ),
}
NEEDED: Mapping[str, Role] = {call: role for role, calls in _MAY.items() for call in calls}
# Lifetime of cached tokens: a token revoked at another gateway works here for up to this time.
_TRUST_SECONDS = 2.0
_MOST_KNOWN, _LONGEST_TOKEN = 10_000, 200
_JWT_DOTS = 2
# Limits that prevent refusals from filling the audit and the log. For this many seconds after a recorded refusal, hil
# only counts repetitions. hil tracks at most this many different refusals.
_TOLD_S, _MOST_REFUSALS = 60.0, 1000


class Unauthenticated(errors.AccessRefused):
    """the farm requires a valid token"""


class Authenticator:
    """Authenticates callers and records refusals."""

    def __init__(self, db: Database, oidc: TokenVerifier | None = None) -> None:
        self._db, self._oidc = db, oidc
        self._known: dict[str, tuple[float, Principal | None]] = {}
        # (user, call, peer) -> time of the last record, and number of refusals since.
        self._refusals: dict[tuple[str, str, str], tuple[float, int]] = {}

    async def authenticate(self, context: Any, *, is_running: bool = False) -> Principal:
        """Return the authenticated caller.

        Args:
            is_running: True for a stream that began with a valid token.

        Raises:
            Unauthenticated: the token is missing or invalid.
            FarmUnreachable: the login provider does not respond.
        """
        given = next((value for key, value in context.invocation_metadata() or () if key == "authorization"), "")
        scheme, _, token = str(given).partition(" ")
        who = None
        if scheme.lower() == "bearer" and token:
            token = token.strip()
            if self._oidc is not None and token.count(".") == _JWT_DOTS and not token.startswith(tokens.PREFIX):
                who = await self._verify_login(self._oidc, token, is_running=is_running)
            else:
                who = await self._look_up_token(token)
        if who is None:
            raise Unauthenticated("invalid, expired or revoked token" if given else "missing token")
        return replace(who, peer=_get_peer(context))

    async def _verify_login(self, oidc: TokenVerifier, token: str, *, is_running: bool) -> Principal:
        """Return the user of a token of the login provider."""
        try:
            return await asyncio.to_thread(oidc.verify, token, is_running=is_running)
        except TokenRejected as error:
            raise Unauthenticated(error.message) from None

    async def record_refusal(self, who: Principal, action: str, reason: str) -> None:
        """Record a refused call in the audit. Repeated refusals are only counted for a while."""
        now, key = time.monotonic(), (who.user, action, who.peer.rpartition(":")[0])  # without the port
        last, count = self._refusals.get(key, (-_TOLD_S, 0))
        if now - last < _TOLD_S:
            self._refusals[key] = (last, count + 1)
            return
        if len(self._refusals) >= _MOST_REFUSALS:
            self._refusals = {one: seen for one, seen in self._refusals.items() if now - seen[0] < _TOLD_S}
            if len(self._refusals) >= _MOST_REFUSALS:
                return
        self._refusals[key] = (now, 0)
        detail = {"reason": reason, **({"times_before": count} if count else {})}
        _LOG.warning("refused", extra={"user": who.user, "peer": who.peer, "action": action, **detail})
        with contextlib.suppress(DatabaseAway):
            async with self._db.transaction() as tx:
                await tokens.note_audit(tx, who, action, "", False, detail)

    def forget(self) -> None:
        """Drop all cached tokens, because a token was revoked.

        A lookup in progress still writes to the dropped cache.
        """
        self._known = {}

    async def _look_up_token(self, token: str) -> Principal | None:
        if len(token) > _LONGEST_TOKEN:
            return None
        known = self._known
        asked, who = known.get(token, (0.0, None))
        if asked and time.monotonic() - asked < _TRUST_SECONDS:
            return who
        async with self._db.transaction() as tx:
            who = await tokens.find_principal(tx, token)
        if len(known) >= _MOST_KNOWN:
            known.clear()
        known[token] = (time.monotonic(), who)
        return who


def check_admission(who: Principal, call: str, what: str | None = None) -> None:
    """Check that a caller may make a call, and the query or action ``what``. Raises AccessRefused or UsageError."""
    action = call if what is None else f"{call} {what}"
    needed = NEEDED.get(action)
    if needed is None:
        if what == NOTHING:
            raise errors.UsageError(
                "unknown farm request: the client is newer than this gateway", hint="upgrade the gateway"
            )
        known = [name.partition(" ")[2] for name in NEEDED if name.startswith(f"{call} ")]
        hint = f"{errors.did_you_mean(str(what), known)}known: {', '.join(known)}"
        raise errors.UsageError(f"unknown farm request {str(what)[:50]!r}", hint=hint)
    if not who.role.covers(needed):
        raise errors.AccessRefused(
            f"permission denied for {who.user}: {action} requires role {needed.value}, not {who.role.value}",
            hint="ask an admin, or use a token with that role (hil farm token add)",
        )


def _make_anonymous_caller(context: Any) -> Principal:
    """Return an unauthenticated caller, for the audit."""
    return Principal(user="", role=Role.VIEWER, peer=_get_peer(context))


def _get_peer(context: Any) -> str:
    """Return the peer address of a call."""
    return str(context.peer() or "")[:200]

"""What every call of a gateway goes through: who calls and may do what, how errors are told, what is audited."""

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
from hil.controller.farm.gateway.metrics import Metrics
from hil.controller.farm.messages import Principal, Role
from hil.controller.farm.rpc import methods
from hil.controller.farm.store import access as tokens
from hil.controller.farm.store.database import Database, DatabaseAway, end_tasks
from hil.protocol import wire, wire_errors

_LOG = logging.getLogger("hil.farm.gateway")
_RECHECK_S, _BROKEN_S = 2.0, 0.1
# Of the calls that a gateway serves at a time, one user has so many at most; hosts attend with as many as they have
# boards. A request that is one message must have come after so long.
_MOST_OF_USER, _REQUEST_S = 1000, 60.0


class Call:
    """One call that is served: its name (``Farm.Submit``), its bearer, and the stream to the caller."""

    def __init__(self, name: str, who: Principal, context: Any, access: Access) -> None:
        self.name, self.who = name, who
        self.doing = name
        self.leaving = False
        self._broken = False
        self.metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        self._context, self._access = context, access
        self._checked = time.monotonic()

    async def send(self, message: Any) -> None:
        """Write to the caller; waits while it does not read."""
        await self._context.write(message)

    async def hung_up(self) -> bool:
        """The caller's side has ended: wait until it is clear whether it meant to. A link that broke ends it too, and
        cancels the call a moment later.
        """
        await asyncio.sleep(_BROKEN_S)
        return not self._broken

    def broke_off(self) -> None:
        """Note that the call was cancelled; what serves it may learn that later (see ``end_tasks``)."""
        self._broken = True

    def admit(self, what: str) -> None:
        """Check that the caller may ask for this, which is what it does from now on."""
        self.doing = f"{self.name} {what[:50]}"
        admit(self.who, self.name, what)

    async def still_good(self) -> None:
        """Look again, now and then, whether a stream's token is still good."""
        if time.monotonic() - self._checked > _RECHECK_S:
            self._checked = time.monotonic()
            # While nobody can say whether it is good, what goes on goes on.
            with contextlib.suppress(DatabaseAway):
                self.who = await self._access.bearer(self._context)
                admit(self.who, self.name)


class Calls:
    """Makes gRPC handlers of services: each is an object with one coroutine a method, of the method's name in small."""

    def __init__(self, access: Access, metrics: Metrics) -> None:
        self._access, self._metrics = access, metrics
        self._stopping = asyncio.Event()
        self._open: Counter[str] = Counter()

    def stop(self) -> None:
        """End every stream with UNAVAILABLE, so that its caller goes elsewhere."""
        self._stopping.set()

    def handlers(self, service: str, servicer: object) -> grpc.GenericRpcHandler:
        """The handler of one service."""
        table = {}
        for name, _, kind, asked, _ in methods(service):
            # A request of one message is read as a stream of one: not before it is known who calls.
            make = getattr(grpc, f"stream_{kind.rpartition('_')[2]}_rpc_method_handler")
            serve = self._served(f"{service}.{name}", getattr(servicer, name.lower()), kind)
            table[name] = make(
                serve, request_deserializer=_decoder(asked), response_serializer=lambda sent: sent.SerializeToString()
            )
        return grpc.method_handlers_generic_handler(f"{wire.PACKAGE}.{service}", table)

    def _served(self, name: str, behaviour: Callable[..., Awaitable[Any]], kind: str) -> Callable[..., Awaitable[Any]]:
        streams_in = kind.startswith("stream")

        async def serve(requests: Any, context: Any) -> Any:
            began, code = time.perf_counter(), "OK"
            call: Call | None = None
            try:
                call = Call(name, await self._access.bearer(context), context, self._access)
                admit(call.who, name)
                with self._counted(call):
                    asked = _checked(requests) if streams_in else await _only(requests)
                    if kind == "unary_unary":
                        return await behaviour(asked, call)
                    return await self._streamed(behaviour, asked, call)
            except asyncio.CancelledError:
                code = "CANCELLED"
                raise
            except Exception as error:
                if isinstance(error, errors.AccessRefused):
                    who, doing = (call.who, call.doing) if call else (_nobody(context), name)
                    await self._access.refused(who, doing, error.message)
                code = await _abort(name, error, context)
            finally:
                # How long a stream lasts is its caller's affair.
                self._metrics.called(name, code, time.perf_counter() - began if kind == "unary_unary" else None)

        return serve

    @contextlib.contextmanager
    def _counted(self, call: Call) -> Iterator[None]:
        """Count a call among its user's."""
        user = call.who.user
        if self._open[user] >= _MOST_OF_USER and not call.name.startswith("Hosts."):
            raise errors.FarmError(
                f"{user} has {_MOST_OF_USER} calls open at this gateway already", hint="end some of them"
            )
        self._open[user] += 1
        try:
            yield
        finally:
            self._open[user] -= 1
            if not self._open[user]:
                del self._open[user]

    async def _streamed(self, behaviour: Callable[..., Awaitable[Any]], request: Any, call: Call) -> Any:
        """A stream, until it ends by itself or this gateway stops."""
        work = asyncio.ensure_future(behaviour(request, call))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            call.leaving = True
            raise Leaving
        except asyncio.CancelledError:
            call.broke_off()
            raise
        finally:
            # Whatever it still says: nobody listens any more.
            await end_tasks(work, stopping)


class Leaving(errors.FarmUnreachable):
    """This gateway stops; another one, or the next, goes on."""


def _decoder(kind: Any) -> Callable[[bytes], Any]:
    """Bytes that are no message come to the handler as None, to be told, not as a broken stream."""

    def decode(raw: bytes) -> Any:
        with contextlib.suppress(DecodeError):
            return kind.FromString(raw)
        return None

    return decode


def _known(request: Any) -> Any:
    if request is None:
        raise errors.UsageError("the request is no message of this protocol")
    return request


async def _only(requests: Any) -> Any:
    """The one message of a request."""
    try:
        return _known(await asyncio.wait_for(anext(aiter(requests), None), _REQUEST_S))
    except (TimeoutError, asyncio.TimeoutError):
        raise errors.UsageError(f"no request came within {_REQUEST_S:g} s") from None


async def _checked(requests: Any) -> AsyncIterator[Any]:
    async for request in requests:
        yield _known(request)


async def _abort(name: str, error: Exception, context: Any) -> str:
    """End a call with the status of its error; returns the status' name."""
    trailing: tuple[tuple[str, bytes], ...] = ()
    if isinstance(error, Unauthenticated):
        code = grpc.StatusCode.UNAUTHENTICATED
    else:
        if not isinstance(error, errors.HilError):
            _LOG.error("call.failed", exc_info=error, extra={"call": name})
            error = errors.FarmError(f"the gateway failed: {type(error).__name__}", hint="its log says why")
        code = status_of(error)
        trailing = ((wire_errors.ERROR_KEY, wire_errors.to_message(error).SerializeToString()),)
    with contextlib.suppress(grpc.aio.AbortError):
        await context.abort(code, wire_errors.status_text(error), trailing)
    return str(code.name)


def status_of(error: errors.HilError) -> grpc.StatusCode:
    """The gRPC status that an error is told with. UNAVAILABLE is what callers try again."""
    if isinstance(error, (DatabaseAway, errors.FarmUnreachable)):
        return grpc.StatusCode.UNAVAILABLE
    if isinstance(error, errors.AccessRefused):
        return grpc.StatusCode.PERMISSION_DENIED
    if isinstance(error, errors.UsageError):
        return grpc.StatusCode.INVALID_ARGUMENT
    return grpc.StatusCode.FAILED_PRECONDITION


# Role -> the calls that take it at least; after a call's name, what it is asked for. What is not here nobody may do.
_MAY: Mapping[Role, tuple[str, ...]] = {
    Role.VIEWER: (
        *("Farm.Follow", "Artifacts.Download", "Farm.Ask", "Farm.Ask jobs", "Farm.Ask job", "Farm.Ask result"),
        *("Farm.Ask logs", "Farm.Ask boards", "Farm.Ask events", "Farm.Ask stats", "Farm.Ask me", "Farm.Ask queue"),
        *("Farm.Ask cases", "Farm.Do"),  # doing depends on what
    ),
    Role.SUBMITTER: (
        *("Farm.Submit", "Farm.Do cancel", "Farm.Do priority", "Farm.Lease", "Farm.Dial"),
        *("Artifacts.Lacks", "Artifacts.Upload"),
    ),
    Role.HOST: ("Hosts.Attend", "Hosts.Report", "Hosts.Accept"),
    Role.ADMIN: (
        *("Farm.Ask audit", "Farm.Ask tokens", "Farm.Do drain", "Farm.Do resume", "Farm.Do forget"),
        *("Farm.Do token", "Farm.Do revoke", "Farm.Do gc"),
    ),
}
NEEDED: Mapping[str, Role] = {call: role for role, calls in _MAY.items() for call in calls}
# A token that another gateway revoked is good here for so long at most.
_TRUST_S = 2.0
_MOST_KNOWN, _LONGEST_TOKEN = 10_000, 200
# Nobody may fill the audit and the log with refusals: the same one again is counted, and told with the next after so
# long. Of so many different ones at a time no more are told.
_TOLD_S, _MOST_REFUSALS = 60.0, 1000


class Unauthenticated(errors.AccessRefused):
    """The farm asks for a token that is good."""


class Access:
    """Checks who calls."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._known: dict[str, tuple[float, Principal | None]] = {}
        # (user, call, peer) -> when it was told last, and how often it came since.
        self._refusals: dict[tuple[str, str, str], tuple[float, int]] = {}

    async def bearer(self, context: Any) -> Principal:
        """Who makes a call; Unauthenticated where that is nobody that we know of."""
        given = next((value for key, value in context.invocation_metadata() or () if key == "authorization"), "")
        scheme, _, token = str(given).partition(" ")
        who = await self._bearer_of(token.strip()) if scheme.lower() == "bearer" and token else None
        if who is None:
            raise Unauthenticated("the token is not good, or no more" if given else "no token was given")
        return replace(who, peer=_peer_of(context))

    async def refused(self, who: Principal, action: str, reason: str) -> None:
        """Write down that somebody was not let. The same once more is only counted for a while."""
        now, key = time.monotonic(), (who.user, action, who.peer.rpartition(":")[0])  # without its port
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
        """Ask the database again for every token: one was revoked. What it is being asked just now counts no more."""
        self._known = {}

    async def _bearer_of(self, token: str) -> Principal | None:
        if len(token) > _LONGEST_TOKEN:
            return None
        known = self._known
        asked, who = known.get(token, (0.0, None))
        if asked and time.monotonic() - asked < _TRUST_S:
            return who
        async with self._db.transaction() as tx:
            who = await tokens.principal_of(tx, token)
        if len(known) >= _MOST_KNOWN:
            known.clear()
        known[token] = (time.monotonic(), who)
        return who


def admit(who: Principal, call: str, what: str | None = None) -> None:
    """Check that somebody may make a call, or ask it for something."""
    action = call if what is None else f"{call} {what}"
    needed = NEEDED.get(action)
    if needed is None:
        known = [name.partition(" ")[2] for name in NEEDED if name.startswith(f"{call} ")]
        hint = f"{errors.did_you_mean(str(what), known)}it knows {', '.join(known)}"
        raise errors.UsageError(f"the farm knows no {str(what)[:50]!r}", hint=hint)
    if not who.role.covers(needed):
        raise errors.AccessRefused(
            f"{who.user} may not do that ({action}): it takes the role {needed.value}, not {who.role.value}",
            hint="an admin can do it, or make a token of that role: hil farm token add",
        )


def _nobody(context: Any) -> Principal:
    """A caller without a token that is good, for the audit."""
    return Principal(user="", role=Role.VIEWER, peer=_peer_of(context))


def _peer_of(context: Any) -> str:
    """Where a call comes from."""
    return str(context.peer() or "")[:200]

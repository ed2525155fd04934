"""Which calls are let in. A call that waits for its client never keeps a thread from one that does not.

The sync server gives every open call a thread, so each kind of call has a room of its own with a limit. What needs no
session (a session's opening, Describe, the clock, health) always gets in: one call too many ends the one that was
silent for longest. What needs a session is refused beyond the session's limit, and ended when its session is over.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc

from hil.agent.session import Session, Sessions
from hil.errors import BoardBusy, UsageError
from hil.protocol import wire

# Calls without a session that have said nothing yet, and how long they may take to say something.
SILENT_CALLS = 16
FIRST_MESSAGE_S = 10.0
# Of each kind of call without a session, so many go on at a time. A stream that waits for its client's next message
# waits no longer than this; a watcher of the health has nothing to say.
OPEN_CALLS = 16
NEXT_MESSAGE_S = 15.0
# Calls of one session at a time.
SESSION_CALLS = 48
# So long may a call take to tell its client that the session is over.
GOODBYE_S = 1.0
# Held sessions that are over, whose owners do not read that.
GOODBYES = 8
# A room's calls that were ended, and have not let go of their threads yet, count up to the same number once more.
THREADS = 2 * (SILENT_CALLS + 4 * OPEN_CALLS + SESSION_CALLS) + 64
_LOOK_S = 0.5

# The methods of the protocol that need no session.
_FREE = {f"/{wire.PACKAGE}.{name}" for name in ("Board/Describe", "Board/Clock", "Sessions/Hold")}
# Sizes of one request. What is not listed here has a few short fields.
SHORT_REQUEST = 1 << 16
_LARGEST = {
    "Put": wire.CHUNK + 1024,
    "Missing": wire.MESSAGE_MAX,
    "Load": wire.MESSAGE_MAX,
    "Invoke": wire.MESSAGE_MAX,
}


class Room:
    """The calls of one kind. One too many ends the one that was silent for longest.

    Args:
        silence_s: how long a client may keep one waiting.
    """

    def __init__(self, most: int, silence_s: float = math.inf) -> None:
        self._most = most
        self._silence_s = silence_s
        self._lock = threading.Lock()
        # In the order of the last message, the oldest first.
        self._heard: dict[grpc.ServicerContext, float] = {}
        self._inside = 0

    @contextlib.contextmanager
    def entered(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Count a call as long as it goes on. Raises BoardBusy: too many calls that were ended have not gone yet."""
        self.enter(context)
        try:
            yield
        finally:
            self.leave(context)

    def enter(self, context: grpc.ServicerContext) -> None:
        """Let a call in; raises as :meth:`entered`."""
        with self._lock:
            if self._inside >= 2 * self._most:
                raise BoardBusy("the agent is busy with too many calls", hint="try again in a moment")
            late = next(iter(self._heard)) if len(self._heard) >= self._most else None
            if late is not None:
                del self._heard[late]
            self._inside += 1
            self._heard[context] = time.monotonic()
        if late is not None:
            late.cancel()

    def leave(self, context: grpc.ServicerContext) -> None:
        """A call has ended."""
        with self._lock:
            self._inside -= 1
            self._heard.pop(context, None)

    def hear(self, context: grpc.ServicerContext) -> None:
        """A call's client said something."""
        with self._lock:
            if self._heard.pop(context, None) is not None:
                self._heard[context] = time.monotonic()

    def sweep(self) -> None:
        """End the calls that were silent for too long."""
        oldest = time.monotonic() - self._silence_s
        with self._lock:
            late = [context for context, heard in self._heard.items() if heard < oldest]
            for context in late:
                del self._heard[context]
        for context in late:
            context.cancel()


class SessionCalls:
    """The calls of the session that has the device, and those of sessions that are over."""

    def __init__(self, most: int = SESSION_CALLS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._calls: dict[grpc.ServicerContext, Session] = {}
        self._inside = 0

    @contextlib.contextmanager
    def entered(self, context: grpc.ServicerContext, session: Session) -> Iterator[None]:
        """Count a session's call as long as it goes on. Raises BoardBusy: the session has too many."""
        with self._lock:
            own = sum(other is session for other in self._calls.values())
            if own >= self._most or self._inside >= 2 * self._most:
                raise BoardBusy(
                    f"{own or self._inside} calls of this session go on already", hint="end some, or wait for them"
                )
            self._inside += 1
            self._calls[context] = session
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                self._calls.pop(context, None)

    def sweep(self) -> None:
        """End what is left of sessions that are over: what waits for its client would wait for ever."""
        before = time.monotonic() - GOODBYE_S
        with self._lock:
            late = [context for context, session in self._calls.items() if session.ended_at < before]
            for context in late:
                del self._calls[context]
        for context in late:
            context.cancel()


class Admission(grpc.ServerInterceptor):
    """Lets calls in, and reads what they say: within the size of its method, and in the thread of the call.

    Attributes:
        goodbyes: the streams of sessions that are over, until their owners have read that.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._calls = SessionCalls()
        self._silent = Room(SILENT_CALLS, FIRST_MESSAGE_S)
        self._asking = Room(OPEN_CALLS)
        self._talking = Room(OPEN_CALLS, NEXT_MESSAGE_S)
        self._watching = Room(OPEN_CALLS)
        self.goodbyes = Room(GOODBYES, GOODBYE_S)
        self._rooms = {
            f"/{wire.PACKAGE}.Sessions/Hold": None,  # it has limits of its own: those who wait, one that has the device
            "/grpc.health.v1.Health/Watch": self._watching,
        }
        threading.Thread(target=self._watch, daemon=True, name="admission").start()

    def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        """Serve every method as a stream of bytes: a unary one would wait for its message before it is asked."""
        handler = continuation(details)
        if handler is None:
            return None
        return grpc.stream_stream_rpc_method_handler(
            partial(self._serve, details.method, handler), response_serializer=handler.response_serializer
        )

    def _serve(self, method: str, handler: Any, raw: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            requests = _decoded(raw, method, handler.request_deserializer)
            if method.startswith(f"/{wire.PACKAGE}.") and method not in _FREE:
                session = self._sessions.of_call(context)
                with self._calls.entered(context, session):
                    yield from _answers(handler, requests, context)
                return
            with self._silent.entered(context):
                first = list(itertools.islice(requests, 1))
            stream = handler.request_streaming
            room = self._rooms.get(method, self._talking if stream else self._asking)
            with room.entered(context) if room else contextlib.nullcontext():
                hear = partial(room.hear, context) if room else _nothing
                yield from _answers(handler, itertools.chain(first, _heard(requests, hear)), context)
        except Exception as error:
            wire.fail(error, context)

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            for room in (self._calls, self._silent, self._talking, self.goodbyes):
                room.sweep()


def _answers(handler: Any, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
    """What a handler answers, whichever of the two sides streams."""
    argument: Any = requests
    if not handler.request_streaming:
        argument = next(requests, None)
        if argument is None:
            raise UsageError("the call carries no message")
    sides = (
        f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    )
    answer = getattr(handler, sides)(argument, context)
    if handler.response_streaming:
        yield from answer
    else:
        yield answer


def _decoded(raw: Iterator[bytes], method: str, decode: Callable[[bytes], Any]) -> Iterator[Any]:
    """The messages that the bytes are. Raises UsageError: they are none, or longer than the method's."""
    name = method.rpartition("/")[2]
    largest = _LARGEST.get(name, SHORT_REQUEST)
    for data in raw:
        if len(data) > largest:
            raise UsageError(f"a request of {name} has {len(data)} bytes, and {largest} are the most")
        try:
            message = decode(data)
        except Exception as error:
            raise UsageError("the request is no message of this protocol") from error
        yield message


def _heard(requests: Iterator[Any], hear: Callable[[], None]) -> Iterator[Any]:
    for request in requests:
        hear()
        yield request


def _nothing() -> None:
    pass

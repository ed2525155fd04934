"""Which calls are let in. A call that waits for its client never keeps a thread from one that does not.

The sync server gives every open call a thread, so each kind of call has a room of its own with a limit. What needs no
session (a session's opening, Describe, the clock, health) always gets in: one call too many ends the one that was
silent for longest. What needs a session is refused beyond the session's limit, and ended when its session is over.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from hil.agent.session import CallContext, Cancellable, Session, Sessions
from hil.errors import BoardBusy, BoardRefused, UsageError
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
# Data connections that carry no call just now.
RESTING = 64
# A room's calls that were ended, and have not let go of their threads yet, count up to the same number once more.
THREADS = 2 * (SILENT_CALLS + 4 * OPEN_CALLS + SESSION_CALLS) + 64
_LOOK_S = 0.5

# The methods of the protocol that need no session.
_FREE = {f"/{wire.PACKAGE}.{name}" for name in ("Board/Describe", "Board/Clock", "Sessions/Hold")}
# Sizes of one request. What is not listed here has a few short fields.
SHORT_REQUEST = 1 << 16
_LARGEST = {
    "Put": wire.DATA_MOST + 1024,
    "Missing": wire.MESSAGE_MAX,
    "Load": wire.MESSAGE_MAX,
    "Invoke": wire.MESSAGE_MAX,
}


class _Calls:
    """Calls that go on: of those that were ended some may not have let go of their threads yet.

    Args:
        most: so many go on at a time.
        busy: is set when a call is let in.
    """

    def __init__(self, most: int, busy: threading.Event) -> None:
        self._most = most
        self._busy = busy
        self._lock = threading.Lock()
        self._calls: dict[Cancellable, Any] = {}
        self._inside = 0

    @contextlib.contextmanager
    def entered(self, context: Cancellable, *more: Any) -> Iterator[None]:
        """Count a call as long as it goes on. Raises BoardBusy: there are too many."""
        self.enter(context, *more)
        try:
            yield
        finally:
            self.leave(context)

    def enter(self, context: Cancellable, *more: Any) -> None:
        """Let a call in; raises as :meth:`entered`."""
        raise NotImplementedError

    def leave(self, context: Cancellable) -> None:
        """A call has ended."""
        with self._lock:
            self._inside -= 1
            self._calls.pop(context, None)

    def sweep(self) -> bool:
        """End the calls that are due; returns whether any go on."""
        with self._lock:
            late = [context for context, value in self._calls.items() if self._is_due(value)]
            for context in late:
                del self._calls[context]
                # Here, for once a call has left it may be another's connection that is ended.
                context.cancel()
            return bool(self._calls)

    def _add(self, context: Cancellable, value: Any) -> None:
        self._inside += 1
        self._calls[context] = value
        if not self._busy.is_set():
            self._busy.set()

    def _is_due(self, value: Any) -> bool:
        raise NotImplementedError


class Room(_Calls):
    """The calls of one kind. One too many ends the one that was silent for longest.

    Args:
        silence_s: how long a client may keep one waiting.
    """

    def __init__(self, most: int, busy: threading.Event, silence_s: float = math.inf) -> None:
        super().__init__(most, busy)
        self._silence_s = silence_s

    def enter(self, context: Cancellable, *more: Any) -> None:
        """Let a call in. Raises BoardBusy: too many calls that were ended have not gone yet."""
        with self._lock:
            if self._inside >= 2 * self._most:
                raise BoardBusy("the agent is busy with too many calls", hint="try again in a moment")
            # They are in the order of the last message, the oldest first.
            late = next(iter(self._calls)) if len(self._calls) >= self._most else None
            if late is not None:
                del self._calls[late]
                late.cancel()
            self._add(context, time.monotonic())

    def heard(self, requests: Iterator[Any], context: Cancellable) -> Iterator[Any]:
        """The messages of a call, whose client says something with each."""
        for request in requests:
            with self._lock:
                if self._calls.pop(context, None) is not None:
                    self._calls[context] = time.monotonic()
            yield request

    def _is_due(self, value: float) -> bool:
        return value < time.monotonic() - self._silence_s


class SessionCalls(_Calls):
    """The calls of the session that has the device, and those of sessions that are over: these would wait for ever."""

    def enter(self, context: Cancellable, *more: Any) -> None:
        """Let a call of a session in. Raises BoardBusy: the session has too many."""
        (session,) = more
        with self._lock:
            own = sum(other is session for other in self._calls.values())
            if own >= self._most or self._inside >= 2 * self._most:
                raise BoardBusy(
                    f"{own or self._inside} calls of this session go on already", hint="end some, or wait for them"
                )
            self._add(context, session)

    def _is_due(self, value: Session) -> bool:
        return value.ended_at < time.monotonic() - GOODBYE_S


class Admission:
    """Lets calls in, whichever way they come.

    Attributes:
        goodbyes: the streams of sessions that are over, until their owners have read that.
        silent: the calls that have said nothing yet.
        resting: data connections between two calls.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._busy = busy = threading.Event()
        self._calls = SessionCalls(SESSION_CALLS, busy)
        self.silent = Room(SILENT_CALLS, busy, FIRST_MESSAGE_S)
        self._asking = Room(OPEN_CALLS, busy)
        self._talking = Room(OPEN_CALLS, busy, NEXT_MESSAGE_S)
        self._watching = Room(OPEN_CALLS, busy)
        self.goodbyes = Room(GOODBYES, busy, GOODBYE_S)
        self.resting = Room(RESTING, busy)
        self._rooms = {
            f"/{wire.PACKAGE}.Sessions/Hold": None,  # it has limits of its own: those who wait, one that has the device
            "/grpc.health.v1.Health/Watch": self._watching,
        }
        threading.Thread(target=self._watch, daemon=True, name="admission").start()

    @contextlib.contextmanager
    def admitted(
        self, method: str, streams: bool, requests: Iterator[Any], context: CallContext
    ) -> Iterator[Iterator[Any]]:
        """Count a call as long as it goes on; gives its requests.

        Args:
            method: its path.
            streams: whether it has any number of requests.

        Raises:
            SessionEnded: it belongs to a session, and its token is not that of the one that has the device.
            BoardBusy: there are too many.
        """
        if method.startswith(f"/{wire.PACKAGE}.") and method not in _FREE:
            with self._calls.entered(context, self._sessions.of_call(context)):
                yield requests
            return
        with self.silent.entered(context):
            first = list(itertools.islice(requests, 1))
        room = self._rooms.get(method, self._talking if streams else self._asking)
        with room.entered(context) if room else contextlib.nullcontext():
            yield itertools.chain(first, room.heard(requests, context) if room else requests)

    def _watch(self) -> None:
        while True:
            # An agent that nobody calls does not wake up.
            self._busy.wait()
            time.sleep(_LOOK_S)
            self._busy.clear()
            if any([room.sweep() for room in (self._calls, self.silent, self._talking, self.goodbyes)]):
                self._busy.set()


def argument_of(requests: Iterator[Any], are_streamed: bool) -> Any:
    """What a handler takes: all requests, or the one that there is. Raises UsageError: there is none."""
    if are_streamed:
        return requests
    if (first := next(requests, None)) is None:
        raise UsageError("the call carries no message")
    return first


def check_size(method: str, size: int) -> None:
    """Check how many bytes a request has. Raises UsageError: they are more than those of the method's may have."""
    largest = _LARGEST.get(method, SHORT_REQUEST)
    if size > largest:
        raise UsageError(f"a request of {method} has {size} bytes, and {largest} are the most")


def decoded(data: bytes, decode: Callable[[bytes], Any]) -> Any:
    """The message that bytes are. Raises UsageError: they are none."""
    try:
        return decode(data)
    except Exception as error:
        raise UsageError("the request is no message of this protocol") from error


def check_token(wanted: str, given: str) -> None:
    """Check a caller's token, where one is wanted. Raises BoardRefused: it is not that."""
    if wanted and not hmac.compare_digest(given.encode(), wanted.encode()):
        why = "the token that was given is not this agent's" if given else "it asks for a token, and none was given"
        hint = "it belongs in the file that token_file in the config's [connection] names, or in HIL_AGENT_TOKEN"
        raise BoardRefused(f"the agent refused us: {why}", hint=hint)

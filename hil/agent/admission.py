"""Admission control for calls. A waiting client cannot starve other clients of threads.

The synchronous gRPC server uses one thread per open call, so each kind of call has a separate limit. Calls that need no
session (opening a session, Describe, the clock, health) are always admitted: above the limit, the agent cancels the
call that has been silent for longest. Session calls above the session's limit are rejected. The agent cancels a
session's open calls when the session ends.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

from hil.agent.session import CallContext, Cancellable, Session, Sessions
from hil.errors import BoardBusy
from hil.protocol import wire

# Calls without a session that have not sent a message yet: maximum number, and timeout for the first message.
SILENT_CALLS = 16
FIRST_MESSAGE_SECONDS = 10.0
# Maximum number of concurrent calls without a session, for each kind. A stream that waits for the client's next message
# times out after NEXT_MESSAGE_SECONDS. Health watchers send no messages and have no timeout.
OPEN_CALLS = 16
NEXT_MESSAGE_SECONDS = 15.0
# Maximum number of concurrent calls in one session.
SESSION_CALLS = 48
# Time limit for reporting to a call's client that the session has ended.
END_REPORT_SECONDS = 1.0
# Maximum number of Hold streams that belong to ended sessions and that clients have not read to the end.
MAX_ENDED_HOLDS = 8
# Maximum number of idle data connections.
MAX_IDLE_CONNECTIONS = 64
# The factor 2 covers cancelled calls that have not released their threads yet.
THREADS = 2 * (SILENT_CALLS + 4 * OPEN_CALLS + SESSION_CALLS) + 64
_LOOK_SECONDS = 0.5

# Protocol methods that need no session.
_FREE = {f"/{wire.PACKAGE}.{name}" for name in ("Board/Describe", "Board/Clock", "Sessions/Hold")}


class _Calls:
    """Registry of open calls. Cancelled calls count as open while they still use a thread.

    Args:
        most: maximum number of open calls.
        busy: event set when a call is admitted.
    """

    def __init__(self, most: int, busy: threading.Event) -> None:
        self._most = most
        self._busy = busy
        self._lock = threading.Lock()
        self._calls: dict[Cancellable, Any] = {}
        self._inside = 0

    @contextlib.contextmanager
    def count_call(self, context: Cancellable, *more: Any) -> Iterator[None]:
        """Count a call while the context is open. Raises BoardBusy above the limit."""
        self.enter(context, *more)
        try:
            yield
        finally:
            self.leave(context)

    def enter(self, context: Cancellable, *more: Any) -> None:
        """Admit a call. Raises the same errors as :meth:`count_call`."""
        raise NotImplementedError

    def leave(self, context: Cancellable) -> None:
        """Remove a finished call."""
        with self._lock:
            self._inside -= 1
            self._calls.pop(context, None)

    def sweep(self) -> bool:
        """Cancel the calls that have waited too long. Return True if any calls remain open."""
        with self._lock:
            late = [context for context, value in self._calls.items() if self._is_due(value)]
            for context in late:
                del self._calls[context]
                # Cancel while holding the lock. After a call has finished, the same connection may serve the next call,
                # which must not be cancelled.
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
    """Open calls of one kind. Above the limit, the call that has been silent for longest is cancelled.

    Args:
        silence_s: cancel calls after this many seconds without a message from the client.
    """

    def __init__(self, most: int, busy: threading.Event, silence_s: float = math.inf) -> None:
        super().__init__(most, busy)
        self._silence_s = silence_s

    def enter(self, context: Cancellable, *more: Any) -> None:
        """Admit a call. Raises BoardBusy if too many cancelled calls have not finished yet."""
        with self._lock:
            if self._inside >= 2 * self._most:
                raise BoardBusy("the agent has reached the limit of active calls", hint="retry later")
            # Calls are ordered by the time of their last message, oldest first.
            late = next(iter(self._calls)) if len(self._calls) >= self._most else None
            if late is not None:
                del self._calls[late]
                late.cancel()
            self._add(context, time.monotonic())

    def track_requests(self, requests: Iterator[Any], context: Cancellable) -> Iterator[Any]:
        """Yield a call's requests and record their arrival times."""
        for request in requests:
            with self._lock:
                if self._calls.pop(context, None) is not None:
                    self._calls[context] = time.monotonic()
            yield request

    def _is_due(self, value: float) -> bool:
        return value < time.monotonic() - self._silence_s


class SessionCalls(_Calls):
    """Open calls that need a session.

    Calls of ended sessions are cancelled after END_REPORT_SECONDS, because such calls would wait forever.
    """

    def enter(self, context: Cancellable, *more: Any) -> None:
        """Admit a session's call. Raises BoardBusy if the session has too many open calls."""
        (session,) = more
        with self._lock:
            own = sum(other is session for other in self._calls.values())
            if own >= self._most or self._inside >= 2 * self._most:
                raise BoardBusy(
                    f"the session already has {own or self._inside} active calls",
                    hint="cancel some calls, or wait until some end",
                )
            self._add(context, session)

    def _is_due(self, value: Session) -> bool:
        return value.ended_at < time.monotonic() - END_REPORT_SECONDS


class Admission:
    """Admission control for gRPC calls and data connections.

    Attributes:
        goodbyes: Hold streams of ended sessions that remain open until the client has read the end.
        silent: calls that have not sent a message yet.
        resting: data connections between two calls.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._busy = busy = threading.Event()
        self._calls = SessionCalls(SESSION_CALLS, busy)
        self.silent = Room(SILENT_CALLS, busy, FIRST_MESSAGE_SECONDS)
        self._asking = Room(OPEN_CALLS, busy)
        self._talking = Room(OPEN_CALLS, busy, NEXT_MESSAGE_SECONDS)
        self._watching = Room(OPEN_CALLS, busy)
        self.goodbyes = Room(MAX_ENDED_HOLDS, busy, END_REPORT_SECONDS)
        self.resting = Room(MAX_IDLE_CONNECTIONS, busy)
        self._rooms = {
            # Hold has other limits: the number of waiting clients, and one active session.
            f"/{wire.PACKAGE}.Sessions/Hold": None,
            "/grpc.health.v1.Health/Watch": self._watching,
        }
        threading.Thread(target=self._watch, daemon=True, name="admission").start()

    @contextlib.contextmanager
    def admit_call(
        self, method: str, streams: bool, requests: Iterator[Any], context: CallContext
    ) -> Iterator[Iterator[Any]]:
        """Count a call while the context is open, and return the requests.

        Args:
            method: full method path.
            streams: whether the client streams requests.

        Raises:
            SessionEnded: the call needs a session, but lacks the active session's token.
            BoardBusy: too many calls are open.
        """
        if method.startswith(f"/{wire.PACKAGE}.") and method not in _FREE:
            with self._calls.count_call(context, self._sessions.find_session(context)):
                yield requests
            return
        with self.silent.count_call(context):
            first = list(itertools.islice(requests, 1))
        room = self._rooms.get(method, self._talking if streams else self._asking)
        with room.count_call(context) if room else contextlib.nullcontext():
            yield itertools.chain(first, room.track_requests(requests, context) if room else requests)

    def _watch(self) -> None:
        while True:
            # Wait for a call, so that an agent without calls does not wake up.
            self._busy.wait()
            time.sleep(_LOOK_SECONDS)
            self._busy.clear()
            if any([room.sweep() for room in (self._calls, self.silent, self._talking, self.goodbyes)]):
                self._busy.set()

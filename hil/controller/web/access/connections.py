"""Server that closes idle connections and limits concurrent requests.

uvicorn has no timeout for request headers, request bodies, or clients that do not read the response. uvicorn also
continues requests after the client disconnects. This module adds timeouts, and cancels the requests of closed
connections (:mod:`hil.core.cancellation`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import anyio
import anyio.to_thread
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from hil.controller.web.access.peers import PEER, Peer, find_peer
from hil.core.cancellation import cancel_on

# Maximum bytes for the request line and all headers.
MAX_HEAD = 32 << 10
# Every open page uses a connection for events.
MAX_CONNECTIONS = 256
# Maximum connections of a client, so that a single client cannot use all of them.
MAX_CONNECTIONS_OF_CLIENT = 64
# Paths of event streams. A stream needs no thread, and browsers reopen a closed stream.
EVENTS = ("/events", "/farm/events")
# Maximum concurrent requests. Further requests wait. This limit and the limits on reads bound the server's memory.
MAX_WORKING = 8
# Timeouts in seconds for request headers, for the request body, and for a client that does not read the response.
HEAD_SECONDS = 15.0
BODY_SECONDS = 120.0
READER_SECONDS = 60.0
# Shutdown times in seconds: delay before the server cancels active requests, and wait for cancelled requests. After the
# last time, the process exits even if threads still run.
CANCEL_S, _CANCELLED_S, EXIT_S = 0.2, 0.2, 0.9


class HttpServer(uvicorn.Server):
    """uvicorn server that processes at most :data:`MAX_WORKING` requests at a time.

    Args:
        owns_process: exit the process at most :data:`EXIT_S` after a signal.
    """

    def __init__(self, config: uvicorn.Config, *, owns_process: bool) -> None:
        super().__init__(config)
        self._owns_process = owns_process

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down after a signal. A thread that ignores cancellation cannot block the exit of the process."""
        if self._owns_process and not self.should_exit:
            timer = threading.Timer(EXIT_S, os._exit, [128 + sig])
            timer.daemon = True
            timer.start()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the server. Limit worker threads of the current event loop."""
        anyio.to_thread.current_default_thread_limiter().total_tokens = MAX_WORKING
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down without log messages about interrupted responses. Close all connections.

        The messages carry no information, because a shutdown always interrupts event streams.
        """
        told = logging.getLogger("uvicorn.error")
        told.addFilter(_reject_record)
        try:
            await super().shutdown(sockets)
            if self.server_state.tasks:  # wait for the cancelled tasks to end
                await asyncio.wait(list(self.server_state.tasks), timeout=_CANCELLED_S)
            # uvicorn leaves connections open if they are new, or if the client does not read the response.
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            await asyncio.sleep(0)  # the transports close in the next iteration of the loop
        finally:
            told.removeFilter(_reject_record)


def _reject_record(record: logging.LogRecord) -> bool:
    return False


class HttpConnection(H11Protocol):
    """Connection with a timeout per request phase.

    At the connection limit, the server closes the connection that has waited longest for request headers. At a
    client's limit, the server closes such a connection of the client, or the client's oldest event stream. If the
    client has neither, the new connection's requests are refused.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.app = _Cancellable(self, self.app)
        self.peer = Peer("", "")
        self.work: _Work | None = None  # the active request
        self._made_at = 0.0  # loop time
        self._timer: asyncio.TimerHandle | None = None
        self._waits_since: float | None = None  # waiting for headers since this loop time
        self._unread = False  # whether the client has stopped reading the response

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request headers."""
        super().connection_made(transport)
        self.peer = find_peer(transport.get_extra_info("socket"), self.client, self.server)
        self._made_at = self.loop.time()
        self._update_timeout()
        self._apply_limits()

    def data_received(self, data: bytes) -> None:
        """Process received bytes. Extend the deadline only if the data completes the headers or the body."""
        super().data_received(data)
        self._update_timeout()

    def on_response_complete(self) -> None:
        """Wait for the next request headers."""
        super().on_response_complete()
        self._update_timeout()

    def pause_writing(self) -> None:
        """Start the timeout for a client that does not read the response."""
        super().pause_writing()
        self._unread = True
        self._start_timer(READER_SECONDS)

    def resume_writing(self) -> None:
        """Stop the timeout after the client reads."""
        super().resume_writing()
        self._unread = False
        self._cancel_timer()
        self._update_timeout()

    def shutdown(self) -> None:
        """Accept no more requests.

        If a response has started, close the connection now. Otherwise, close the connection after :data:`CANCEL_S`.
        """
        super().shutdown()
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started:
                self.transport.close()
            else:
                self.loop.call_later(CANCEL_S, self._abort_connection)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer and cancel the request, because the client cannot receive a response."""
        self._cancel_timer()
        self._waits_since = None
        super().connection_lost(exc)
        if self.work is not None:
            self.work.cancel()

    def _apply_limits(self) -> None:
        others = [one for one in self.connections if isinstance(one, HttpConnection) and one is not self]
        own = [one for one in others if one.peer.name == self.peer.name]
        if len(own) >= MAX_CONNECTIONS_OF_CLIENT:
            if not (_close_longest_waiting(own) or _close_oldest_stream(own)):
                self.limit_concurrency = 0  # uvicorn then responds with 503
        elif len(self.connections) >= MAX_CONNECTIONS:
            _close_longest_waiting(others)

    def _update_timeout(self) -> None:
        if self._unread:
            return
        cycle: Any = self.cycle  # None in uvicorn until headers arrive
        if cycle is None or cycle.response_complete:
            if self._waits_since is None:
                self._waits_since = self.loop.time()
                self._start_timer(HEAD_SECONDS)
        elif cycle.more_body:
            if self._waits_since is not None or self._timer is None:
                self._waits_since = None
                self._start_timer(BODY_SECONDS)
        else:
            self._waits_since = None
            self._cancel_timer()

    def _start_timer(self, seconds: float) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(seconds, self._abort_connection)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _abort_connection(self) -> None:
        self._cancel_timer()
        self._waits_since = None
        self.connections.discard(self)
        self.transport.abort()


def _close_longest_waiting(connections: Sequence[HttpConnection]) -> bool:
    """Close the connection that has waited longest for request headers. Return False if none waits."""
    waiting = [(one._waits_since, one) for one in connections if one._waits_since is not None]
    if waiting:
        min(waiting, key=lambda pair: pair[0])[1]._abort_connection()
    return bool(waiting)


def _close_oldest_stream(connections: Sequence[HttpConnection]) -> bool:
    """Close the oldest connection with an event stream. Return False if there is none."""
    streams = [one for one in connections if one.work is not None and one.scope["path"] in EVENTS]
    if streams:
        min(streams, key=lambda one: one._made_at)._abort_connection()
    return bool(streams)


class _Work:
    """Work for a single request, in the event loop and in threads."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.flag = threading.Event()

    def cancel(self) -> None:
        """Cancel tasks in the event loop, and threads that check for cancellation."""
        self.flag.set()
        self.scope.cancel()


class _Cancellable:
    """ASGI wrapper that adds the peer to a connection's requests, and makes them cancellable."""

    def __init__(self, connection: HttpConnection, app: ASGIApp) -> None:
        self._connection, self._app = connection, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request. Cancel the request if the connection closes."""
        scope[PEER] = self._connection.peer
        work = self._connection.work = _Work()
        try:
            with work.scope, cancel_on(work.flag):
                await self._app(scope, receive, send)
        except BaseException:
            if not work.flag.is_set():
                raise
        finally:
            self._connection.work = None

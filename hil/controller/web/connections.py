"""Connections that keep a server busy without saying anything are ended, and only so many requests work at a time.

uvicorn waits without end for a request's head and body, and for whoever does not read an answer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import anyio.to_thread
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

# Of the lines of a request's head with all its headers.
MOST_HEAD = 32 << 10
# Each open page holds one connection for what is told live.
MOST_CONNECTIONS = 256
# So many requests are worked on at a time; the others wait. With what each may read it bounds the server's memory.
MOST_WORKING = 8
# Until a request's head is there; until its body is; until who asked reads on.
HEAD_S = 15.0
BODY_S = 120.0
READER_S = 60.0
_CANCELLED_S = 0.2


class Server(uvicorn.Server):
    """uvicorn's server, that works on :data:`MOST_WORKING` requests at a time."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, in the loop whose threads work on requests."""
        anyio.to_thread.current_default_thread_limiter().total_tokens = MOST_WORKING
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End, without a word about the answers that are cut off by it: what is told live never ends by itself."""
        told = logging.getLogger("uvicorn.error")
        told.addFilter(_nothing)
        try:
            await super().shutdown(sockets)
            if self.server_state.tasks:  # cancelled just now; they have no more to do than to end
                await asyncio.wait(list(self.server_state.tasks), timeout=_CANCELLED_S)
        finally:
            told.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


class Connection(H11Protocol):
    """A connection with a deadline for whatever it is waited for.

    Where there are too many, the one that has waited longest for a request's head makes room.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._timer: asyncio.TimerHandle | None = None
        self._waits_since: float | None = None  # for a head, by the loop's clock
        self._unread = False  # whether nobody reads the answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a first head."""
        super().connection_made(transport)
        self._look()
        if len(self.connections) >= MOST_CONNECTIONS:
            silent = [one for one in self.connections if isinstance(one, Connection) and one is not self]
            waiting = [(one._waits_since, one) for one in silent if one._waits_since is not None]
            if waiting:
                min(waiting, key=lambda pair: pair[0])[1]._end()

    def data_received(self, data: bytes) -> None:
        """Take bytes; they set no deadline anew unless they complete what was waited for."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """Wait for the next head."""
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        """Nobody reads the answer: wait for so long."""
        super().pause_writing()
        self._unread = True
        self._set(READER_S)

    def resume_writing(self) -> None:
        """Somebody does."""
        super().resume_writing()
        self._unread = False
        self._clear()
        self._look()

    def shutdown(self) -> None:
        """Nothing more is asked for here. An answer that has begun ends: whoever is told live asks again."""
        super().shutdown()
        cycle: Any = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline."""
        self._clear()
        self._waits_since = None
        super().connection_lost(exc)

    def _look(self) -> None:
        if self._unread:
            return
        cycle: Any = self.cycle  # uvicorn's None until a head is there
        if cycle is None or cycle.response_complete:
            if self._waits_since is None:
                self._waits_since = self.loop.time()
                self._set(HEAD_S)
        elif cycle.more_body:
            if self._waits_since is not None or self._timer is None:
                self._waits_since = None
                self._set(BODY_S)
        else:
            self._waits_since = None
            self._clear()

    def _set(self, seconds: float) -> None:
        self._clear()
        self._timer = self.loop.call_later(seconds, self._end)

    def _clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._clear()
        self._waits_since = None
        self.connections.discard(self)
        self.transport.abort()

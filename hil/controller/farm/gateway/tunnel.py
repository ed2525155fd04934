"""Connections to the agents of leased boards: a holder's Dial and a worker's Accept, joined in this process.

An empty piece says that nothing more comes in its direction: gRPC lets a server end a stream only in both at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

from hil.controller.farm.gateway.calls import Call
from hil.controller.farm.store.database import end_tasks
from hil.controller.farm.store.notifications import PubSub, drained
from hil.errors import FarmError, UsageError
from hil.protocol.v1 import farm_pb2 as pb

_ACCEPT_S, _PAUSE_S = 10.0, 5.0

Pieces = AsyncIterator[pb.Piece]


class Tunnel:
    """One connection, which ends with its lease: its holder's side serves it, the worker's side joins and waits."""

    def __init__(self, lease: int) -> None:
        self.id, self.lease = secrets.token_hex(16), lease  # the worker calls Accept with the id
        self._moved = self._sending = 0
        loop = asyncio.get_running_loop()
        self._joined: asyncio.Future[tuple[Pieces, Call]] = loop.create_future()
        self._over: asyncio.Future[str] = loop.create_future()

    def end(self, reason: str) -> None:
        """End it, on both sides."""
        if not self._over.done():
            self._over.set_result(reason)

    async def join(self, pieces: Pieces, call: Call) -> None:
        """The worker's side, until the connection has ended; UsageError where somebody joined before."""
        if self._joined.done():
            raise UsageError("this connection was accepted already")
        self._joined.set_result((pieces, call))
        try:
            await asyncio.shield(self._over)
        finally:
            self.end("the board's host ended the connection")

    async def serve(self, pieces: Pieces, call: Call) -> None:
        """The holder's side: bytes both ways until both are through."""
        both: list[asyncio.Task[None]] = []
        try:
            await _first(self._joined, self._over, timeout_s=_ACCEPT_S)
            if not self._joined.done():
                reason = self._over.result() if self._over.done() else f"it did not answer within {_ACCEPT_S:g} s"
                raise FarmError(f"no connection to the board's host: {reason}")
            far_pieces, far = self._joined.result()
            both = [asyncio.create_task(self._copy(*way)) for way in ((pieces, far), (far_pieces, call))]
            await _first(*both, self._over)
            if not self._over.done():
                await self._linger(both)
            if self._over.done() and not all(one.done() for one in both):
                raise FarmError(f"the connection to the board ended: {self._over.result()}")
            for one in both:
                if one.done():
                    one.result()
        finally:
            await end_tasks(*both)
            self.end("the holder ended the connection")

    async def _copy(self, pieces: Pieces, to: Call) -> None:
        """Everything that comes, then an empty piece; waits while the other side does not read."""
        async for piece in pieces:
            await self._send(piece, to)
            if not piece.data:
                return
        await self._send(pb.Piece(), to)

    async def _send(self, piece: pb.Piece, to: Call) -> None:
        self._moved += 1
        self._sending += 1
        try:
            await to.send(piece)
        finally:
            self._sending -= 1

    async def _linger(self, both: list[asyncio.Task[None]]) -> None:
        """One side is through: what the other one still sends is carried until it pauses, for it may never end. A
        reader that is slow is waited for.
        """
        moved = -1
        whole: asyncio.Future[Any] = asyncio.gather(*both, return_exceptions=True)
        while (moved != self._moved or self._sending) and not whole.done() and not self._over.done():
            moved = self._moved
            await _first(whole, self._over, timeout_s=_PAUSE_S)


class Tunnels:
    """The connections that go through this gateway."""

    def __init__(self) -> None:
        self._open: dict[str, Tunnel] = {}

    @contextlib.contextmanager
    def opened(self, lease: int) -> Iterator[Tunnel]:
        """A new one, known until the context ends."""
        tunnel = Tunnel(lease)
        self._open[tunnel.id] = tunnel
        try:
            yield tunnel
        finally:
            del self._open[tunnel.id]

    def find(self, id: str) -> Tunnel:
        """The connection that a worker was asked to accept; UsageError where there is none, or no more."""
        if (tunnel := self._open.get(id)) is None:
            raise UsageError("nobody waits for this connection any more")
        return tunnel

    async def follow(self, hub: PubSub) -> None:
        """End the connections of leases that are over, until cancelled."""
        with hub.subscribed() as queue:
            while True:
                for change in await drained(queue):
                    if change["kind"] == "ended":
                        for one in list(self._open.values()):
                            if one.lease == change["lease"]:
                                one.end(f"the lease is over: {change['reason']}")


async def _first(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Wait until one of them is done."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

"""Tunnels to the agents of leased boards: join a holder's Dial and a worker's Accept stream in this process.

An empty piece marks the end of a direction. A gRPC server can only end both directions of a stream together.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

from hil.controller.farm.database.database import end_tasks
from hil.controller.farm.database.notifications import PubSub, drain_queue
from hil.controller.farm.gateway.calls import GatewayCall
from hil.errors import FarmError, UsageError
from hil.protocol.v1 import farm_pb2 as pb

_ACCEPT_S, _PAUSE_S = 10.0, 5.0

Pieces = AsyncIterator[pb.Piece]


class LeaseTunnel:
    """Connection between a lease holder and a worker. Ends with the lease."""

    def __init__(self, lease: int) -> None:
        self.id, self.lease = secrets.token_hex(16), lease  # the worker passes the id to Accept
        self._moved = self._sending = 0
        loop = asyncio.get_running_loop()
        self._joined: asyncio.Future[tuple[Pieces, GatewayCall]] = loop.create_future()
        self._over: asyncio.Future[str] = loop.create_future()

    def end(self, reason: str) -> None:
        """End the connection on both sides."""
        if not self._over.done():
            self._over.set_result(reason)

    async def join(self, pieces: Pieces, call: GatewayCall) -> None:
        """Attach the worker's stream and wait for the connection's end. Raises UsageError if already attached."""
        if self._joined.done():
            raise UsageError("connection already accepted")
        self._joined.set_result((pieces, call))
        try:
            await asyncio.shield(self._over)
        finally:
            self.end("the board's host ended the connection")

    async def serve(self, pieces: Pieces, call: GatewayCall) -> None:
        """Serve the holder's stream: wait for the worker, then copy data in both directions."""
        both: list[asyncio.Task[None]] = []
        try:
            await _wait_for_first(self._joined, self._over, timeout_s=_ACCEPT_S)
            if not self._joined.done():
                reason = self._over.result() if self._over.done() else f"no response within {_ACCEPT_S:g} s"
                raise FarmError(f"cannot connect to the board's host: {reason}")
            far_pieces, far = self._joined.result()
            both = [asyncio.create_task(self._copy_pieces(*way)) for way in ((pieces, far), (far_pieces, call))]
            await _wait_for_first(*both, self._over)
            if not self._over.done():
                await self._finish_other_direction(both)
            if self._over.done() and not all(one.done() for one in both):
                raise FarmError(f"the connection to the board ended: {self._over.result()}")
            for one in both:
                if one.done():
                    one.result()
        finally:
            await end_tasks(*both)
            self.end("the holder ended the connection")

    async def _copy_pieces(self, pieces: Pieces, to: GatewayCall) -> None:
        """Copy all pieces, then send an empty piece. Waits while the receiver does not read."""
        async for piece in pieces:
            await self._send_piece(piece, to)
            if not piece.data:
                return
        await self._send_piece(pb.Piece(), to)

    async def _send_piece(self, piece: pb.Piece, to: GatewayCall) -> None:
        self._moved += 1
        self._sending += 1
        try:
            await to.send(piece)
        finally:
            self._sending -= 1

    async def _finish_other_direction(self, both: list[asyncio.Task[None]]) -> None:
        """Copy the second direction up to the next pause, after the first direction has ended.

        The second direction may never end. Waits for slow readers.
        """
        moved = -1
        whole: asyncio.Future[Any] = asyncio.gather(*both, return_exceptions=True)
        while (moved != self._moved or self._sending) and not whole.done() and not self._over.done():
            moved = self._moved
            await _wait_for_first(whole, self._over, timeout_s=_PAUSE_S)


class TunnelRegistry:
    """Open tunnels of this gateway."""

    def __init__(self) -> None:
        self._open: dict[str, LeaseTunnel] = {}

    @contextlib.contextmanager
    def open_tunnel(self, lease: int) -> Iterator[LeaseTunnel]:
        """Create a tunnel, registered inside the context."""
        tunnel = LeaseTunnel(lease)
        self._open[tunnel.id] = tunnel
        try:
            yield tunnel
        finally:
            del self._open[tunnel.id]

    def find(self, id: str) -> LeaseTunnel:
        """Return a registered tunnel. Raises UsageError if the tunnel does not exist."""
        if (tunnel := self._open.get(id)) is None:
            raise UsageError("unknown or expired connection")
        return tunnel

    async def follow(self, hub: PubSub) -> None:
        """Task: close the tunnels of ended leases."""
        with hub.subscribe() as queue:
            while True:
                for change in await drain_queue(queue):
                    if change["kind"] == "ended":
                        for one in list(self._open.values()):
                            if one.lease == change["lease"]:
                                one.end(f"the lease has ended: {change['reason']}")


async def _wait_for_first(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Wait for the first future to be done."""
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

"""Test gateway tunnels with slow sides and sides that end at different times."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("psycopg", reason="needs the extra `farm`")

from hil.controller.farm.gateway import tunnel
from hil.controller.farm.gateway.tunnel import TunnelRegistry
from hil.errors import FarmError, UsageError
from hil.protocol.v1 import farm_pb2 as pb


class Side:
    """What a gateway sees of one side: what it sends, then silence or an end; what was sent to it.

    Args:
        slow_s: how long it takes to read a piece.
    """

    def __init__(self, *pieces: bytes, ends: bool = True, slow_s: float = 0) -> None:
        self._pieces, self._ends, self._slow_s = pieces, ends, slow_s
        self.got: list[bytes] = []

    async def iter_pieces(self) -> AsyncIterator[pb.Piece]:
        for data in self._pieces:
            yield pb.Piece(data=data)
        if not self._ends:
            await asyncio.Event().wait()

    async def send(self, piece: pb.Piece) -> None:
        await asyncio.sleep(self._slow_s)
        self.got.append(piece.data)


@pytest.fixture(autouse=True)
def pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "_PAUSE_S", 0.05)


def carried(holder: Any, board: Any, *, over_after_s: float | None = None) -> TunnelRegistry:
    async def go() -> TunnelRegistry:
        tunnels = TunnelRegistry()
        with tunnels.open_tunnel(7) as one:
            joined = asyncio.create_task(tunnels.find(one.id).join(board.iter_pieces(), board))
            if over_after_s is not None:
                asyncio.get_running_loop().call_later(over_after_s, one.end, "the lease has ended")
            try:
                await asyncio.wait_for(one.serve(holder.iter_pieces(), holder), 20)
            finally:
                await asyncio.wait_for(joined, 20)
        return tunnels

    return asyncio.run(go())


def test_tunnel_carries_data_and_end_in_both_directions() -> None:
    holder, board = Side(b"a", b"b"), Side(b"1", b"2", b"3")
    tunnels = carried(holder, board)
    assert board.got == [b"a", b"b", b""] and holder.got == [b"1", b"2", b"3", b""]
    with pytest.raises(UsageError, match="unknown or expired connection"):
        tunnels.find("x")


@pytest.mark.ci
def test_tunnel_delivers_all_data_to_slow_reader_after_eof() -> None:
    holder, board = Side(b"all that I ask", slow_s=0.3), Side(b"1", b"2", b"3")
    carried(holder, board)
    assert holder.got == [b"1", b"2", b"3", b""]


def test_tunnel_closes_without_waiting_for_open_side() -> None:
    holder, board = Side(b"bye"), Side(b"1", ends=False)
    carried(holder, board)
    assert board.got == [b"bye", b""] and holder.got == [b"1"]


def test_tunnel_closes_when_lease_ends_despite_stalled_reader() -> None:
    holder, board = Side(b"bye", slow_s=60), Side(b"1", b"2")
    with pytest.raises(FarmError, match="the lease has ended"):
        carried(holder, board, over_after_s=0.3)

"""The server between a lease's holder and the agent: what it refuses by itself."""

from __future__ import annotations

import socket
from pathlib import Path

import grpc
import pytest

from hil.controller.devices.board_client import Target
from hil.controller.farm.host.tunnel_endpoint import LeaseGuard
from hil.protocol import wire


def test_a_message_that_no_agent_takes_is_refused_by_its_length(tmp_path: Path):
    # An agent that accepts and says nothing: what is refused is refused by the guard.
    silent = socket.socket(socket.AF_UNIX)
    silent.bind(f"{tmp_path}/agent.sock")
    silent.listen()
    guard = LeaseGuard(Target(f"unix:{tmp_path}/agent.sock"), 7, tmp_path / "guard.sock")
    try:
        with silent, grpc.insecure_channel(guard.address, [("grpc.max_send_message_length", -1)]) as channel:
            put = channel.stream_stream("/hil.v1.Blobs/Put")
            with pytest.raises(grpc.RpcError) as refused:
                list(put(iter([bytes(wire.MESSAGE_MAX + 1)]), timeout=60))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    finally:
        guard.close()

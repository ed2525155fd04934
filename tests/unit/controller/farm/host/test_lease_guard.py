"""Test the server between the holder of a lease and the agent."""

from __future__ import annotations

import socket
from pathlib import Path

import grpc
import pytest

from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.farm.host.tunnel_endpoint import LeaseGuard
from hil.protocol import wire


def test_lease_guard_rejects_oversized_message(tmp_path: Path):
    # The agent never answers, so any refusal is from the guard.
    silent = socket.socket(socket.AF_UNIX)
    silent.bind(f"{tmp_path}/agent.sock")
    silent.listen()
    guard = LeaseGuard(AgentEndpoint(f"unix:{tmp_path}/agent.sock"), 7, tmp_path / "guard.sock")
    try:
        with silent, grpc.insecure_channel(guard.address, [("grpc.max_send_message_length", -1)]) as channel:
            put = channel.stream_stream("/hil.v1.Blobs/Put")
            with pytest.raises(grpc.RpcError) as refused:
                list(put(iter([bytes(wire.MESSAGE_MAX + 1)]), timeout=60))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    finally:
        guard.close()

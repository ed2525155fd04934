"""The proxy between the simulator's address and its agent."""

from __future__ import annotations

import gc
import socket
from pathlib import Path

import pytest

from hil.sim.link import FaultyLink


@pytest.mark.parametrize("family", ["unix", "tcp"])
def test_client_of_ended_agent_is_disconnected(tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture) -> None:
    behind = f"unix:{tmp_path / 'agent'}" if family == "unix" else "127.0.0.1:1"
    host, _, port = FaultyLink("127.0.0.1:0", behind).address.rpartition(":")
    with socket.create_connection((host, int(port))) as client:
        client.settimeout(20)
        assert client.recv(1) == b""
    gc.collect()  # asyncio logs an unhandled exception only then
    assert not caplog.records

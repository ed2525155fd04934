from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.fake_agent import FakeAgent

from hil.agent import server
from hil.agent.server import Agent, AgentConfig
from hil.agent.supervisor import Supervisor
from hil.controller.devices.agent_client import session_streams
from hil.controller.devices.agent_client.call import CallFailed
from hil.controller.devices.agent_client.connection import AgentConnection
from hil.controller.devices.board_client import AgentEndpoint
from hil.errors import (
    BoardBusy,
    BoardError,
    BoardLost,
    BoardRefused,
    BoardUnreachable,
    UsageError,
    VersionMismatch,
)
from hil.protocol import wire
from hil.protocol.listening import is_served
from hil.protocol.v1 import agent_pb2 as pb


@pytest.mark.ci
def test_describe_waits_for_agent_importing_runtimes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(self: Supervisor) -> dict[str, dict[str, object]]:
        time.sleep(2)
        return {"slow": {"version": "7"}}

    monkeypatch.setattr(Supervisor, "describe", slow)
    agent = Agent(AgentConfig(f"unix:{tmp_path}/a.sock", tmp_path / "store"))
    connection = AgentConnection(AgentEndpoint(agent.address), "board")
    try:
        assert [one.version for one in connection.describe(timeout=1).runtimes] == ["7"]
    finally:
        connection.close()
        agent.stop()


def test_agent_rejects_path_blocked_by_other_files(tmp_path: Path) -> None:
    (tmp_path / "a.sock.data").mkdir()
    (tmp_path / "a.sock.data" / "somebody's").touch()
    with pytest.raises(UsageError, match=r"a\.sock\.data"):
        Agent(AgentConfig(f"unix:{tmp_path}/a.sock", tmp_path / "store"))


def test_agent_serves_data_socket_before_grpc(tmp_path, monkeypatch):
    """Otherwise a caller that finds only the agent's socket would use gRPC for its whole lifetime."""
    there: list[bool] = []

    class Watched(server.GrpcOnDemand):
        def __init__(self, *arguments: Any) -> None:
            there.append(is_served(f"{tmp_path}/a.sock.data"))
            super().__init__(*arguments)

    monkeypatch.setattr(server, "GrpcOnDemand", Watched)
    Agent(AgentConfig(f"unix:{tmp_path}/a.sock", tmp_path / "store")).stop()
    assert there == [True]


def test_second_agent_leaves_sockets_of_first(tmp_path):
    first = Agent(AgentConfig(f"unix:{tmp_path}/a.sock", tmp_path / "store"))
    try:
        with pytest.raises(UsageError, match="is already in use"):
            Agent(AgentConfig(f"unix:{tmp_path}/a.sock", tmp_path / "other"))
        assert is_served(f"{tmp_path}/a.sock.data")
    finally:
        first.stop()


@pytest.mark.parametrize(("size", "most_s"), [(0, 61), (1 << 20, 200), (64 << 20, 7000), (16 << 30, 7 * 3600)])
def test_transfer_limit_grows_with_size(size, most_s):
    assert session_streams.STALL_SECONDS <= session_streams.transfer_limit_s(size) < most_s


@pytest.mark.ci
def test_slow_input_transfer_raises_lost(monkeypatch):
    """Each piece is taken before the link counts as stalled."""
    monkeypatch.setattr(session_streams, "_SLOWEST_BYTES_S", 1 << 30)
    monkeypatch.setattr(session_streams, "_BULK_BYTES", 1 << 40)
    monkeypatch.setattr(session_streams, "STALL_SECONDS", 1.5)
    over = threading.Event()

    class Slow:
        def send(self, message: Any) -> None:
            if over.wait(0.4 if isinstance(message, memoryview) else 0):
                raise CallFailed("CANCELLED", "the call was ended here")

        cancel = over.set

    began = time.monotonic()
    stream = session_streams.InvokeStream(Slow(), lambda: None)
    with pytest.raises(BoardLost, match="in time"):
        stream.call(pb.InvokeStart(), [memoryview(bytes(200 * wire.CHUNK))], {}, 60.0, None, 1)
    assert time.monotonic() - began < 20


@pytest.mark.ci
def test_hung_agent_raises_unreachable_soon(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(tmp_path / "a.sock"))
        hung.listen()
        connection = AgentConnection(AgentEndpoint(f"unix:{tmp_path}/a.sock"), "board")
        start = time.monotonic()
        with pytest.raises(BoardUnreachable, match="no agent responds"):
            connection.describe(timeout=1)
        assert time.monotonic() - start < 30
        connection.close()


def test_describe_rejects_agent_of_other_protocol(tmp_path: Path) -> None:
    with FakeAgent(tmp_path / "a.sock", protocol=wire.PROTOCOL + 1) as agent:
        connection = AgentConnection(AgentEndpoint(agent.address), "rpi5")
        with pytest.raises(VersionMismatch, match=rf"hil 1 \(agent protocol {wire.PROTOCOL + 1}\)"):
            connection.describe()
        connection.close()


def reset(error: int) -> CallFailed:
    """Return the error that gRPC reports for an HTTP/2 reset, as seen with a busy agent."""
    return CallFailed("UNAVAILABLE", f"Stream removed (RST_STREAM (Received RST_STREAM with error code {error}))")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (reset(7), BoardBusy),
        (reset(2), BoardLost),
        # From an agent that sends no typed error.
        (CallFailed("UNAUTHENTICATED", "the token is not this agent's"), BoardRefused),
    ],
)
def test_refusing_agent_raises_busy_or_refused(tmp_path: Path, error: CallFailed, kind: type[BoardError]) -> None:
    connection = AgentConnection(AgentEndpoint(f"unix:{tmp_path}/nobody.sock"), "board")
    try:
        told = connection._translate_error(error)
        assert type(told) is kind
    finally:
        connection.close()

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from hil.agent.server import Agent, AgentConfig
from hil.agent.supervisor import Supervisor
from hil.controller.devices.board_client import Target
from hil.controller.devices.call import CallFailed
from hil.controller.devices.connection import AgentConnection
from hil.errors import BoardBusy, BoardError, BoardLost, BoardRefused, BoardUnreachable, UsageError


def test_an_agent_that_imports_its_runtimes_first_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(self: Supervisor) -> dict[str, dict[str, object]]:
        time.sleep(2)
        return {"slow": {"version": "7"}}

    monkeypatch.setattr(Supervisor, "describe", slow)
    agent = Agent(AgentConfig(f"unix:{tmp_path}/a.sock", tmp_path / "store"))
    connection = AgentConnection(Target(agent.address), "board")
    try:
        assert [one.version for one in connection.describe(timeout=1).runtimes] == ["7"]
    finally:
        connection.close()
        agent.stop()


def test_an_agent_does_not_start_beside_what_callers_would_take_for_its_data_connections(tmp_path: Path) -> None:
    (tmp_path / "a.sock.data").mkdir()
    (tmp_path / "a.sock.data" / "somebody's").touch()
    with pytest.raises(UsageError, match=r"a\.sock\.data"):
        Agent(AgentConfig(f"unix:{tmp_path}/a.sock", tmp_path / "store"))


def test_one_that_hangs_is_told_of_soon(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(tmp_path / "a.sock"))
        hung.listen()
        connection = AgentConnection(Target(f"unix:{tmp_path}/a.sock"), "board")
        start = time.monotonic()
        with pytest.raises(BoardUnreachable, match="no agent answers"):
            connection.describe(timeout=1)
        assert time.monotonic() - start < 30
        connection.close()


def reset(error: int) -> CallFailed:
    """What gRPC says where a server answers with an HTTP/2 error: what it said was seen on a busy agent."""
    return CallFailed("UNAVAILABLE", f"Stream removed (RST_STREAM (Received RST_STREAM with error code {error}))")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (reset(7), BoardBusy),
        (reset(2), BoardLost),
        # Of an agent that sends no typed error of it.
        (CallFailed("UNAUTHENTICATED", "the token is not this agent's"), BoardRefused),
    ],
)
def test_an_agent_that_takes_no_more_calls_or_refuses_them_is_not_lost(
    tmp_path: Path, error: CallFailed, kind: type[BoardError]
) -> None:
    connection = AgentConnection(Target(f"unix:{tmp_path}/nobody.sock"), "board")
    try:
        told = connection._translated(error)
        assert type(told) is kind
    finally:
        connection.close()

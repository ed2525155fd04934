"""Test a worker's connection to its board, with a real agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.waiting import eventually

from hil.agent.server import Agent, AgentConfig
from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.devices.choosing.board_factory import open_board
from hil.controller.farm.host import board_connection as ways
from hil.controller.farm.host.board_connection import BoardConnection
from hil.controller.farm.host.inventory import BoardEntry, HostInfo
from hil.controller.farm.messages import Grant, JobSpec, Kind
from hil.controller.farm.paths import FarmAddress
from hil.errors import BoardBusy, BoardUnreachable, UsageError

CONFIG = '[board]\nhw_type = "bench"\n[labels]\nchip = "x"\n[connection]\naddress = "unix:{socket}"\n'


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Callable[[], Agent]]:
    running: list[Agent] = []

    def start() -> Agent:
        running.append(Agent(AgentConfig(listen=f"unix:{tmp_path}/a.sock", store=tmp_path / "store", runtimes={})))
        return running[-1]

    yield start
    for one in running:
        one.stop()


@pytest.fixture
def way(tmp_path: Path) -> Iterator[BoardConnection]:
    config = tmp_path / "bench.toml"
    config.write_text(CONFIG.format(socket=tmp_path / "a.sock"))
    site = HostInfo("lab1", "berlin", FarmAddress(("unix:g",), "t"), tmp_path / "host", tmp_path)
    way = BoardConnection(BoardEntry("bench", config, tmp_path / "post"), site, print)
    yield way
    way.close()


def grant(fence: int) -> Grant:
    return Grant(fence, "17", 17, "bench", fence, 6.0, 60.0, 1, JobSpec(Kind.RUN))


def test_card_includes_agent_labels_after_look(agent, way, tmp_path):
    before = way.read_card()
    assert before.labels == {"chip": "x"}
    agent()
    way.refresh()
    card = way.read_card()
    assert (card.name, card.hw_type, card.site, card.host) == ("bench", "bench", "berlin", "lab1")
    assert card.labels.items() > {"chip": "x"}.items() and card.labels["cores"] >= 1
    assert not card.direct and not card.powered and str(tmp_path) not in card.config


def test_take_ends_session_with_lower_fence(agent, way, tmp_path):
    agent()
    older = AgentClient(AgentEndpoint(f"unix:{tmp_path}/a.sock"), "bench")
    older.open_session("older", fence=4, on_wait=print)
    assert not way.is_held(4)
    way.refresh()
    assert way.is_held(4) and not way.is_held(5)
    way.take(grant(5))
    assert not way.is_held(4)
    eventually(lambda: not older.has_session)
    with pytest.raises(BoardBusy, match="stale fence"):
        older.open_session("again", fence=4, on_wait=print)
    older.close()


def test_take_reads_newer_fence_from_board_when_refused(agent, way, tmp_path):
    agent()
    other = AgentClient(AgentEndpoint(f"unix:{tmp_path}/a.sock"), "bench")
    other.open_session("by hand", fence=90, on_wait=print)
    other.close()
    with pytest.raises(BoardBusy):
        way.take(grant(5))
    assert way.fence == 90
    way.take(grant(91))


def test_connection_recovers_after_agent_restart(agent, way):
    first = agent()
    way.take(grant(1))
    first.stop()
    agent()
    way.take(grant(2))
    way.refresh()
    assert way.fence == 2


def test_take_raises_board_unreachable_without_agent(way):
    with pytest.raises(BoardUnreachable):
        way.take(grant(1))
    assert way.target is None


def test_job_reuses_worker_connection_of_same_lease(agent, way, tmp_path):
    agent()
    way.take(grant(7))
    choice = way.choice(grant(7))
    assert (choice.target, choice.config.connection.fence) == (f"unix:{tmp_path}/a.sock", 7)
    with open_board(choice) as board:
        taken = board.client
        token = taken._hold.token
        board.take()
        assert way.is_held(7) and taken._hold.token == token, "in the session that took it"
    assert not way.is_held(7)
    way.take(grant(8))
    with open_board(way.choice(grant(8))) as board:
        assert board.client is not taken
        board.take()
        assert way.is_held(8)


def silence(client: AgentClient) -> None:
    """Simulate a client that has heard from the agent too long ago."""
    hold = client._hold
    assert hold is not None
    hold._guard.set_timeout(0.0)
    eventually(lambda: hold.silent)


def test_job_takes_board_back_after_silent_period(agent, way):
    agent()
    way.take(grant(7))
    silence(way._client)
    with open_board(way.choice(grant(7))) as board:
        board.take()
        assert way.is_held(7)
        silence(board.client)
        board.client.open_session("again", fence=7, wait_s=60, on_wait=print)
        assert way.is_held(7)


def test_job_fails_when_newer_fence_took_board(agent, way, tmp_path):
    agent()
    way.take(grant(7))
    newer = AgentClient(AgentEndpoint(f"unix:{tmp_path}/a.sock"), "bench")
    newer.open_session("newer", fence=8, on_wait=print)
    eventually(lambda: not way._client.has_session)
    with open_board(way.choice(grant(7))) as board, pytest.raises(BoardBusy, match="stale fence"):
        board.take()
    newer.close()


def test_higher_fence_opens_new_session(agent, way):
    agent()
    way.take(grant(7))
    assert way._client.open_session("same", fence=7, on_wait=print) == 7
    assert way._client.open_session("higher", fence=9, wait_s=60, on_wait=print) == 9
    assert way.is_held(9)


def test_release_frees_board_before_job_starts(agent, way):
    agent()
    way.take(grant(7))
    way.release()
    assert not way.is_held(7)
    way.take(grant(8))
    assert way.is_held(8)


def test_faults_require_local_simulator(agent, way):
    agent()
    way.take(grant(7))
    with pytest.raises(UsageError, match="--fault requires a simulator"):
        open_board(replace(way.choice(grant(7)), faults=("hang",)))


def test_bring_skips_runtime_on_externally_managed_agent(agent, way):
    agent()
    assert way.deploy_runtime("onnxruntime", print) is False and way.deploy_runtime("", print) is False


def test_bring_installs_missing_runtime_over_ssh(agent, way, tmp_path, monkeypatch):
    asked = []
    real = ways.open_link

    def opened(request):
        asked.append(request.runtime)
        # Replace the agent at the SSH address with the test's agent.
        config = request.config
        there = replace(config, connection=replace(config.connection, address=f"unix:{tmp_path}/a.sock"))
        return real(replace(request, config=there))

    monkeypatch.setattr(ways, "open_link", opened)
    agent()
    way.deploy_runtime("tflite", print)
    # The owner of this agent chose its runtimes.
    assert asked == [""]
    config = tmp_path / "bench.toml"
    config.write_text(config.read_text().replace(f"unix:{tmp_path}/a.sock", "root@bench"))
    way.close()
    way.deploy_runtime("", print)
    way.deploy_runtime("tflite", print)
    assert asked == ["", "", "tflite"]
    way.info["runtimes"] = [{"name": "tflite"}]
    way.deploy_runtime("tflite", print)
    assert asked == ["", "", "tflite"]

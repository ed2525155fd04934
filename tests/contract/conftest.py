"""Every way to reach an agent. The contract's tests run over each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from agents import start_process, stop_process

from hil.agent.server import Agent, AgentConfig
from hil.controller.client import AgentClient, Target


@pytest.fixture(scope="session", params=["in-process", "agent over TCP", "simulator"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An agent that runs: in this process, as a process on loopback TCP, as a simulator on a Unix socket."""
    folder = tmp_path_factory.mktemp("agent")
    if request.param == "in-process":
        agent = Agent(AgentConfig(f"unix:{folder}/a.sock", folder / "store"))
        yield agent.address
        agent.stop()
        return
    if request.param == "simulator":
        process, found = start_process("hil.sim", f"unix:{folder}/s.sock", folder / "store")
    else:
        process, found = start_process("hil.agent", "127.0.0.1:0", folder / "store")
    yield found
    stop_process(process)


@pytest.fixture
def connect(address: str) -> Iterator[Callable[[], AgentClient]]:
    """Makes clients of the agent, closed at the end."""
    clients: list[AgentClient] = []

    def make() -> AgentClient:
        clients.append(AgentClient(Target(address), "contract"))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(connect: Callable[[], AgentClient]) -> AgentClient:
    """A client with a session."""
    made = connect()
    made.open_session("contract test", wait_s=10, on_wait=print)
    return made

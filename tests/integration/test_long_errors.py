"""Long error messages of a real agent arrive over a direct connection and a farm tunnel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.agents import Program
from support.fake_farm import FakeFarm

import hil as library
from hil import errors
from hil.controller.devices.agent_client.client import AgentClient

NAMES = {"ascii": "x", "wide": "\U0001f600", "nul": "\0%"}


def refuse(client: AgentClient, program: Program, name: str) -> errors.HilError:
    """Load a program with an unknown runtime and return the error."""
    program.push(client)
    with pytest.raises(errors.HilError) as caught:
        program.load(client, runtime=name)
    return caught.value


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_client_receives_long_error_of_agent(start_agent, open_client, add_programs, name: str) -> None:
    client = open_client(start_agent())
    for size in (1, 16 << 10, 1 << 20):
        error = refuse(client, add_programs["onnxruntime"], name * (size // len(name.encode()) or 1))
        assert type(error) is errors.LoadFailed
        assert error.exit_code == errors.EXIT_STAGE
        assert ("[cut: " in error.message) == (size > 1)
        assert size == 1 or repr(name * 1000)[1:-1] in error.detail


def test_client_receives_long_error_through_farm_tunnel(
    fake_farm: FakeFarm, start_agent: Callable[..., str], add_programs: dict[str, Program]
) -> None:
    fake_farm.add("lab1-sim-1", start_agent(module="hil.sim"), direct=False)
    with library.connect("farm:") as board:
        board.take()
        error = refuse(board.client, add_programs["onnxruntime"], "é" * (1 << 19))
    assert fake_farm.boards["lab1-sim-1"].dials > 0
    assert type(error) is errors.LoadFailed
    assert error.detail.count("é") > 500_000

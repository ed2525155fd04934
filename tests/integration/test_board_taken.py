"""A connected board tolerates changes of its agent before use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from support.boards import MakeBoard
from support.waiting import eventually

from hil.controller.devices.board import Board
from hil.controller.devices.choosing.board_factory import connect_board
from hil.controller.devices.choosing.board_resolver import choose
from hil.controller.devices.deploy import ensure
from hil.errors import BoardUnreachable
from tools.virtual_board import VirtualBoard

pytestmark = pytest.mark.board


@pytest.fixture(scope="module")
def machine(start_board: MakeBoard) -> VirtualBoard:
    return start_board(name="kept")


@pytest.fixture
def connect(machine: VirtualBoard) -> Iterator[Callable[[], Board]]:
    with ExitStack() as opened:
        yield lambda: opened.enter_context(
            connect_board(choose(machine.address, identity=machine.identity, known_hosts=machine.known_hosts))
        )


@pytest.mark.slow
def test_take_restarts_exited_agent(machine: VirtualBoard, connect):
    board = connect()
    machine.run(["pkill", "-HUP", "-f", "--", "-m hil.agent --"], check=True)
    eventually(lambda: not machine.run(["pgrep", "-f", "--", "-m hil.agent --"]).stdout)

    board.take()

    assert machine.run(["pgrep", "-f", "--", "-m hil.agent --"]).stdout
    assert board.logs("") == []


@pytest.mark.slow
def test_take_updates_build_of_replaced_agent(machine: VirtualBoard, connect):
    board = connect()
    ours = board.info["build"]
    other = connect()
    assert other.shell is not None
    recipe = ensure.AgentRecipe.of(("iree", "onnxruntime"))
    place = ensure.ensure_agent(other.shell, recipe, folder="", board=machine.name, say=lambda text: None)
    assert place.build != ours

    board.take()

    assert board.info["build"] == board._link.build == place.build


def test_connect_reports_hung_agent_with_clean_hint(machine: VirtualBoard, connect):
    connect()
    machine.run(["pkill", "-STOP", "-f", "--", "-m hil.agent --"], check=True)
    try:
        with pytest.raises(BoardUnreachable) as caught:
            connect()
        assert "hil board clean --force" in caught.value.hint
    finally:
        machine.run(["pkill", "-CONT", "-f", "--", "-m hil.agent --"], check=True)

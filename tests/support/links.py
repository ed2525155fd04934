"""All connections to a board, for tests of their common behaviour."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from hil.agent.server import Agent, AgentConfig
from hil.controller.devices.deploy.ensure import AgentRecipe, ensure_agent
from hil.controller.devices.ssh.connect import open_shell
from hil.controller.devices.ssh.tunnel import open_tunnel
from hil.core.board_config import Connection
from support.agents import start_process, stop_process
from support.microcontrollers import CHIPS
from tools.virtual_board import VirtualBoard

BOARDS = {"x86_64 board": "board_x86", "aarch64 board": "board_aarch64"}
_LONG = [pytest.mark.board, pytest.mark.ci]
AGENTS = [
    *("in-process", "agent over TCP", "simulator"),
    pytest.param("x86_64 board", marks=pytest.mark.board),
    pytest.param("aarch64 board", marks=[*_LONG, pytest.mark.slow]),
]
# Agents of emulated microcontrollers: they run only firmware.
MICROCONTROLLERS = [
    pytest.param(chip, marks=[pytest.mark.ci, pytest.mark.slow, pytest.mark.timeout(600)]) for chip in CHIPS
]
COMMANDS = [
    pytest.param("x86_64 board, by command", marks=_LONG),
    pytest.param("aarch64 board, by command", marks=[*_LONG, pytest.mark.slow]),
]

# Functions with every kind of end: one reports an error unless its input is 3, and one never ends.
ENDS = """
func.func @refuses(%n: i32) -> i32 {
  %0 = arith.constant 3 : i32
  %1 = arith.cmpi eq, %n, %0 : i32
  cf.assert %1, "it is not three"
  return %n : i32
}
func.func @hangs(%n: i32) -> i32 {
  %0 = scf.while (%i = %n) : (i32) -> i32 {
    %1 = arith.constant 0 : i32
    %2 = arith.cmpi ne, %n, %1 : i32
    scf.condition(%2) %i : i32
  } do {
  ^bb0(%i: i32):
    %3 = arith.addi %i, %n : i32
    scf.yield %3 : i32
  }
  return %0 : i32
}
"""


@dataclass(frozen=True)
class Reached:
    """Reached board.

    Attributes:
        address: address of the agent, or of the board if it has no agent.
        arch: architecture of the machine.
        board: for a board over SSH: its address, with identity and known hosts.
        by_command: True if the board has no agent.
        firmware: config of the board, if it is a microcontroller.
    """

    address: str
    arch: str = platform.machine()
    board: str = ""
    identity: Path | None = None
    known_hosts: Path | None = None
    by_command: bool = False
    firmware: Path | None = None


@contextmanager
def reach(name: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[Reached]:
    """Provide a board through one of the connections above. ``folder`` stores its files."""
    kind, _, how = name.partition(", ")
    if kind in BOARDS:
        board = request.getfixturevalue(BOARDS[kind])
        yield from _by_command(board) if how else _deployed(board, folder)
    elif name == "in-process":
        agent = Agent(AgentConfig(f"unix:{folder}/a.sock", folder / "store"))
        yield Reached(agent.address)
        agent.stop()
    elif name in CHIPS:
        chip = request.getfixturevalue("start_chip")(name)
        more = ("--config", str(chip.config), "--address", chip.address)
        process, address = start_process("hil.mcu", f"unix:{folder}/m.sock", folder / "store", *more)
        yield Reached(address, name, firmware=chip.config)
        stop_process(process)
    else:
        simulated = name == "simulator"
        listen = f"unix:{folder}/s.sock" if simulated else "127.0.0.1:0"
        process, address = start_process("hil.sim" if simulated else "hil.agent", listen, folder / "store")
        yield Reached(address)
        stop_process(process)


def _deployed(board: VirtualBoard, folder: Path) -> Iterator[Reached]:
    """Agent that hil deployed to a board, through a tunnel."""
    connection = Connection(identity=str(board.identity), known_hosts=str(board.known_hosts))
    with open_shell(board.address, connection, board=board.name, base=folder) as shell:
        place = ensure_agent(shell, AgentRecipe.of(["iree", "onnxruntime"]), folder="", board=board.name, say=print)
        tunnel = open_tunnel(shell, place.socket)
        yield Reached(tunnel.address, board.arch, board.address, board.identity, board.known_hosts)
        tunnel.close()


def _by_command(board: VirtualBoard) -> Iterator[Reached]:
    yield Reached(board.address, board.arch, board.address, board.identity, board.known_hosts, by_command=True)

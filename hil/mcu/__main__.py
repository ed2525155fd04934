"""`python -m hil.mcu --listen unix:PATH --store DIR --config FILE`: the agent of a microcontroller.

The agent runs on the machine with the serial line. It prints one JSON line on stdout when ready: {"address": ...,
"pid": ...}.
"""

from __future__ import annotations

import sys
from typing import Any

from hil.agent.__main__ import make_parser, read_config, serve
from hil.agent.server import Agent, AgentConfig
from hil.core.board_config import BoardConfig
from hil.core.boards import load_board
from hil.core.chips import parse_chip
from hil.core.serial_device import make_claim_name
from hil.core.text import show_visibly
from hil.errors import HilError, UsageError
from hil.protocol.v1 import agent_pb2 as pb
from hil.protocol.wire_errors import BRIDGE_KINDS

RUNTIME = "mcu"
_CLASS = "hil.mcu.runtime:McuRuntime"


def start(options: dict[str, Any], board: BoardConfig, address: str) -> Agent:
    """Start the agent of a board.

    Args:
        options: fields of :class:`AgentConfig`.
        address: the serial line, ``serial:...``.

    Raises:
        UsageError: the config has no chip.
    """
    if board.mcu is None:
        raise UsageError(f"{board.path} does not configure a microcontroller", hint="add an [mcu] table")
    chip = parse_chip(board.mcu.values)
    settings = {
        "address": address,
        "chip": dict(board.mcu.values),
        "flash": board.mcu.flash,
        "reset": board.mcu.reset,
        "boot_s": board.mcu.boot_s,
        "watchdog_s": board.mcu.watchdog_s,
    }
    machine = pb.Machine(
        hostname=board.name,
        system="bare metal",
        arch=chip.core.arch,
        cpu_model=f"{chip.name} ({chip.core.name})",
        cores=1,
        memory_bytes=chip.ram.size,
    )
    return Agent(
        AgentConfig(
            **{**options, "name": options.get("name") or board.name},
            runtimes={RUNTIME: _CLASS},
            runtime_options={"mcu": settings},
            machine=machine,
            worker_kinds=BRIDGE_KINDS,
            # Each hil process starts an agent of its own, so the agents of a line wait for each other.
            claim_board=True,
            claim_name=make_claim_name(address),
        )
    )


def main() -> None:
    """Start the agent."""
    show_visibly()
    options = make_parser("hil.mcu", __doc__ or "")
    options.add_argument("--config", required=True, metavar="FILE|NAME", help="board config with an [mcu] table")
    options.add_argument("--address", required=True, metavar="serial:DEVICE", help="serial line")
    arguments = options.parse_args()
    try:
        agent = start(read_config(arguments), load_board(arguments.config).config, arguments.address)
    except HilError as error:
        print(f"hil.mcu: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    serve(agent, agent.address, lifeline=arguments.lifeline, idle_exit=arguments.idle_exit)


if __name__ == "__main__":
    main()

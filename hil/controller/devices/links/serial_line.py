"""Links to microcontrollers: start an agent on this machine, which talks to the board over a serial line."""

from __future__ import annotations

import subprocess

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.devices.links.link import Link, LinkKind
from hil.controller.devices.links.simulator_process import get_address, log_of, start
from hil.core.files import read_end
from hil.core.processes import wait_or_kill
from hil.core.scratch import make_folder, remove_tree
from hil.errors import UsageError

PREFIX = "serial:"
_MODULE = "hil.mcu"
_END_SECONDS = 10.0


def open_serial_line(choice: BoardChoice) -> Link:
    """Start the agent of a microcontroller.

    Raises:
        UsageError: the board's config has no [mcu] table.
        BoardUnreachable: the agent does not start in time.
    """
    config = choice.config
    if config.mcu is None:
        raise UsageError(
            f"the chip at {choice.target} is unknown",
            hint="use --board with a board config that has an [mcu] table: see docs/microcontrollers.md",
        )
    folder = make_folder("hil-mcu-", for_sockets=True)
    try:
        process = start(config, folder, "--lifeline", "--address", choice.target, stdin=subprocess.PIPE, module=_MODULE)
    except BaseException:
        remove_tree(folder)
        raise

    def close() -> None:
        if process.stdin:
            process.stdin.close()
        wait_or_kill(process, _END_SECONDS)
        remove_tree(folder)

    return Link(AgentEndpoint(get_address(folder)), close, lambda: read_end(log_of(folder)))


SERIAL_KIND = LinkKind("serial", open_serial_line, lambda text: text.startswith(PREFIX))

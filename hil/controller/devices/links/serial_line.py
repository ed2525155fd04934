"""Links to microcontrollers: start an agent on this machine, which talks to the board over a serial line."""

from __future__ import annotations

import contextlib
import subprocess

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.devices.links.link import Link, LinkKind
from hil.controller.devices.links.simulator_process import get_address, log_of, start
from hil.core.boards import list_boards, read_board
from hil.core.files import read_end
from hil.core.processes import wait_or_kill
from hil.core.scratch import make_folder, remove_tree
from hil.core.serial_device import PREFIX, check_serial_device, parse_serial_address
from hil.errors import UsageError

_MODULE = "hil.mcu"
_END_SECONDS = 10.0


def open_serial_line(choice: BoardChoice) -> Link:
    """Start the agent of a microcontroller.

    Raises:
        UsageError: the board's config has no [mcu] table, or the address is invalid.
        BoardUnreachable: the device does not exist or may not be opened, or the agent does not start in time.
    """
    config = choice.config
    place = parse_serial_address(choice.target)
    # Some devices exist only after the firmware was flashed: those of a USB port of the chip.
    if config.mcu is None or not config.mcu.flash:
        check_serial_device(place)
    if config.mcu is None:
        raise _make_unknown_chip_error(choice.target)
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


def _make_unknown_chip_error(address: str) -> UsageError:
    names = []
    for name, path in list_boards().items():
        with contextlib.suppress(UsageError):
            if read_board(path).config.mcu is not None:
                names.append(name)
    known = f" (known: {', '.join(names)})" if names else ""
    return UsageError(
        f"the chip at {address} is unknown: no board config has this address",
        hint=f"add --runtime-hw-type CONFIG, with the name or file of a board config with an [mcu] table{known}: see "
        "docs/microcontrollers.md",
    )


SERIAL_KIND = LinkKind("serial", open_serial_line, lambda text: text.startswith(PREFIX))

"""`hil farm power`: switch a board's power."""

from __future__ import annotations

import click

from hil.controller.cli.commands import make_command
from hil.controller.cli.farm.options import connect_farm
from hil.controller.cli.options import json_option
from hil.controller.cli.screen import answer, print_message
from hil.controller.farm.messages import POWER_ACTIONS
from hil.controller.records.commands.farm import BoardPower
from hil.controller.records.lab.farm import SwitchedPower

# The gateway waits this long for the host, and some seconds for the database.
_LIMIT_SECONDS = 930.0
_DONE = {"on": "switched on", "off": "switched off", "cycle": "power-cycled"}


@make_command(epilog="Example: hil farm power rpi5-3 cycle")
@click.argument("board")
@click.argument("action", type=click.Choice(POWER_ACTIONS))
@json_option
def power(board: str, action: str, as_json: bool) -> None:
    """Switch the power of BOARD on or off, or cycle it, with the commands in [power] of the board's config.

    You need the right `power` (hil farm token add --right power) or the role admin. If another user has BOARD, only an
    admin can switch it, and the job runs again on another board. A board that is switched off stays out of service up
    to `hil farm power BOARD on`. A board that is switched on is checked before the next job. hil farm events shows who
    did it.
    """
    with connect_farm() as farm:
        if not as_json:
            print_message(f"waiting for the host of {board}")
        done: SwitchedPower = farm.do("power", name=board, switch=action, limit_s=_LIMIT_SECONDS)
    answer(as_json, BoardPower(board=board, action=action, state=done.state), f"{board} {_DONE[action]}, {done.state}")

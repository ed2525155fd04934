"""`hil farm provision`: write an image to a board of the farm."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hil.controller.cli.commands import make_command
from hil.controller.cli.farm.options import connect_farm
from hil.controller.cli.options import FILE, json_option
from hil.controller.cli.screen import answer, print_message
from hil.controller.cli.usage.candidates import complete_file
from hil.controller.devices.power_control.provision import digest_image
from hil.controller.farm.messages import BoardState, Right
from hil.controller.records.commands.farm import FarmProvisionReport
from hil.controller.records.lab.farm import FarmBoard, FarmUser
from hil.errors import EXIT_BOARD, EXIT_OK, AccessRefused, UsageError, did_you_mean

if TYPE_CHECKING:
    from hil.controller.farm.client.client import FarmClient

# The gateway waits four hours for the host, and some seconds for the database.
_LIMIT_SECONDS = 4 * 3600 + 30.0
# Maximum time until the result of the check after the image, and the interval of queries.
_CHECK_SECONDS, _LOOK_SECONDS = 300.0, 0.5
_CHECKING = (BoardState.SUSPECT.value, BoardState.DRAINING.value)
_GOOD = (BoardState.ONLINE.value, BoardState.MAINTENANCE.value)
_LATER = "the farm checks the board after your lease"


@make_command(epilog="Example: hil farm provision rpi5-3 --image sdcard.img")
@click.argument("board")
@click.option("--image", type=FILE, required=True, metavar="FILE", help="Image to write.", shell_complete=complete_file)
@json_option
def provision(board: str, image: Path, as_json: bool) -> int:
    """Write an image to BOARD with [provision] of the board's config on its host, and check the board.

    You need the right `provision` (hil farm token add --right provision) or the role admin. BOARD must be free, or
    leased by you. No job starts on BOARD until it has passed the check. The farm quarantines a board that fails the
    check. The farm checks a board that you lease after the end of the lease. Ctrl-C does not stop the host. Later
    records of BOARD contain the image's SHA-256. Exit code: 0 if the board passes the check or responds during your
    lease, 4 otherwise.
    """
    sha256 = digest_image(image)
    start = time.monotonic()
    with connect_farm() as farm:
        user = _check_request(farm, board)
        name = f"sha256:{sha256}"
        if not as_json:
            print_message(f"uploading {image.name} (sha256 {sha256[:12]})")
        farm.upload({name: image})
        if not as_json:
            print_message(f"writing {image.name} to {board}")
        farm.do("provision", name=board, file=image.name, image=name, limit_s=_LIMIT_SECONDS)
        found = _wait_for_check(farm, board, user)
    is_leased = found.user == user and found.state in _CHECKING
    passed = is_leased or found.state in _GOOD
    report = FarmProvisionReport(
        board=board,
        file=image.name,
        sha256=sha256,
        seconds=time.monotonic() - start,
        state=found.state,
        reason="" if found.state == BoardState.ONLINE.value else _LATER if is_leased else found.reason,
        exit_code=EXIT_OK if passed else EXIT_BOARD,
    )
    reason = f": {report.reason}" if report.reason else ""
    lines = [f"{board}: wrote {image.name} in {report.seconds:.1f} s; {found.state}{reason}", f"sha256 {sha256}"]
    return answer(as_json, report, *lines)


def _check_request(farm: FarmClient, name: str) -> str:
    """Raise an error for a request that the farm would refuse, before the upload of the image. Return the user."""
    boards: list[FarmBoard] = farm.ask("boards")
    board = next((one for one in boards if one.name == name), None)
    if board is None:
        names = [one.name for one in boards]
        raise UsageError(
            f"board {name!r} not found on the farm", hint=f"{did_you_mean(name, names)}list all: hil farm boards"
        )
    user: FarmUser = farm.ask("me")
    if Right.PROVISION.value not in user.rights:
        raise AccessRefused(
            f"permission denied for {user.user}: the token lacks the right {Right.PROVISION.value}",
            hint=f"an admin creates such a token: hil farm token add {user.user} --role submitter --right provision",
        )
    if not board.provisions and board.state != BoardState.OFFLINE.value:
        raise UsageError(
            f"the host of {name} cannot write images",
            hint="add the table [provision] to the board's config on its host; update hosts of older releases",
        )
    if board.user and board.user != user.user:
        raise AccessRefused(f"{name} is used by {board.user}", hint=f"wait for its end: hil farm drain {name} --wait")
    return user.user


def _wait_for_check(farm: FarmClient, name: str, user: str) -> FarmBoard:
    """Return the board after its check, or immediately if the user leases it, because the check follows the lease."""
    deadline = time.monotonic() + _CHECK_SECONDS
    while True:
        boards: list[FarmBoard] = farm.ask("boards")
        board = next((one for one in boards if one.name == name), None)
        if board is None:
            raise UsageError(f"board {name!r} was removed from the farm")
        if board.state not in _CHECKING or board.user == user or time.monotonic() > deadline:
            return board
        time.sleep(_LOOK_SECONDS)

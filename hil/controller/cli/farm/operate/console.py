"""`hil farm console`: read the console of a farm's board."""

from __future__ import annotations

import contextlib
import sys
import threading

import click

from hil.controller.cli.board.console import check_limit, send_input
from hil.controller.cli.commands import make_command
from hil.controller.cli.farm.options import connect_farm
from hil.controller.cli.options import json_option
from hil.controller.cli.screen import answer, print_message
from hil.controller.cli.times import parse_past
from hil.controller.devices.console.spool import make_entry
from hil.controller.devices.console.viewing import filter_lines, format_line
from hil.controller.farm.client.console import FarmConsole
from hil.controller.farm.client.lease_session import FarmProvider
from hil.controller.records.commands.boards import ConsoleDocument
from hil.errors import UsageError

_LEASE_SECONDS = 60.0


@make_command(
    epilog="""\b
Examples:
  hil farm console rpi5-3
  hil farm console rpi5-3 --since 10m --seconds 5 --grep oops"""
)
@click.argument("board")
@click.option("--since", metavar="TIME", help="Also print earlier lines: 10m, 2h, 9:00 (local time).")
@click.option("--grep", default="", metavar="REGEX", help="Print only lines that match.")
@click.option("--no-follow", is_flag=True, help="Print the host's stored lines and end, without opening the console.")
@click.option("--seconds", type=float, metavar="S", callback=check_limit, help="End after this time.")
@click.option("--write", is_flag=True, help="Lease the board, and send each line of stdin to the console.")
@json_option
def console(
    board: str, since: str | None, grep: str, no_follow: bool, seconds: float | None, write: bool, as_json: bool
) -> None:
    """Print the console of BOARD until Ctrl-C.

    The host of BOARD opens the console while a user or a job reads it. You need the role submitter. Without --write,
    this command needs no lease, and a job on BOARD continues. With --write, the command ends 3 seconds after the end of
    stdin, or after --seconds. --no-follow prints only the lines that the host has stored, by default all.
    """
    if as_json and not no_follow and seconds is None:
        raise UsageError("--json prints one document at the end", hint="use --no-follow or --seconds S")
    if no_follow and (write or seconds is not None):
        raise UsageError(f"--no-follow and {'--write' if write else '--seconds'} are mutually exclusive")
    since_s = parse_past(since, "--since").timestamp() if since else None
    with connect_farm() as farm, contextlib.ExitStack() as stack:
        held = None
        if write:
            lease = stack.enter_context(FarmProvider().order(f'name="{board}"', "hil farm console --write"))
            lease.wait_with_progress(_LEASE_SECONDS, print_message)
            held = lease.held
        reading = FarmConsole(farm, board, since_s, seconds, held, follows=not no_follow)
        if write:
            # The thread may wait for stdin when the command ends.
            threading.Thread(target=send_input, args=(reading, seconds is None), daemon=True).start()
        lines = filter_lines(reading.iter_lines(), grep)
        if as_json:
            answer(True, ConsoleDocument(board=board, lines=[make_entry(line) for line in lines]))
            return
        for line in lines:
            click.echo(format_line(line))
            sys.stdout.flush()

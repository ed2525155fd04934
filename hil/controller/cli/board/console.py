"""`hil board console` and `hil board provision`."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from hil.controller.cli.board.options import add_board_place, choose_place, print_checks
from hil.controller.cli.commands import make_command
from hil.controller.cli.options import FILE, check_seconds, json_option
from hil.controller.cli.screen import answer, print_message
from hil.controller.cli.usage.candidates import complete_file
from hil.errors import EXIT_BOARD, EXIT_OK, BoardError, UsageError

if TYPE_CHECKING:
    from hil.controller.devices.board_choice import BoardChoice
    from hil.controller.devices.console.lines import ConsoleLine


# Time for the output of the last input.
OUTPUT_SECONDS = 3.0


class InputConsole(Protocol):
    """A console that takes input."""

    def send_line(self, text: str) -> None:
        """Send a line."""

    def stop(self) -> None:
        """End the output."""


def check_limit(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    """Check the value of --seconds."""
    return None if value is None else check_seconds(context, option, value)


@make_command(
    epilog="""\b
Examples:
  hil board console rpi5
  hil board console rpi5 --since 10m --no-follow --grep oops"""
)
@add_board_place
@click.option("--since", metavar="TIME", help="Also print earlier lines: 10m, 2h, 9:00 (local time).")
@click.option("--grep", default="", metavar="REGEX", help="Print only lines that match.")
@click.option("--no-follow", is_flag=True, help="Print the stored lines and end, without opening the console.")
@click.option("--seconds", type=float, metavar="S", callback=check_limit, help="End after this time.")
@click.option("--write", is_flag=True, help="Reserve the board, and send each line of stdin to the console.")
@json_option
def console(
    as_json: bool,
    since: str | None,
    grep: str,
    no_follow: bool,
    seconds: float | None,
    write: bool,
    **settings: Any,
) -> None:
    """Print a board's console until Ctrl-C. Works during a run.

    hil keeps the latest lines of each console that a run or this command has read: --since prints them first.
    --no-follow prints only these lines, by default all. With --write, the command ends 3 seconds after the end of
    stdin, or after --seconds.
    """
    from hil.controller.cli.times import parse_past
    from hil.controller.devices.console.spool import make_entry
    from hil.controller.devices.console.viewing import filter_lines, format_line, require_console
    from hil.controller.records.commands.boards import ConsoleDocument

    if as_json and not no_follow and seconds is None:
        raise UsageError("--json prints one document at the end", hint="use --no-follow or --seconds S")
    if no_follow and (write or seconds is not None):
        raise UsageError(f"--no-follow and {'--write' if write else '--seconds'} are mutually exclusive")
    choice = choose_place(settings)
    config = require_console(choice)
    since_s = parse_past(since, "--since").timestamp() if since else 0.0 if no_follow else None
    found = filter_lines(_read_lines(choice, since_s, seconds, follows=not no_follow, writes=write), grep)
    if as_json:
        entries = [make_entry(line) for line in found]
        answer(True, ConsoleDocument(board=config.name, lines=entries))
        return
    for line in found:
        click.echo(format_line(line))
        sys.stdout.flush()


def _read_lines(
    choice: BoardChoice, since_s: float | None, seconds: float | None, *, follows: bool, writes: bool
) -> Iterator[ConsoleLine]:
    from hil.controller.devices.console.viewing import read_stored_lines, reserve_board, watch_console

    if not follows:
        yield from read_stored_lines(choice.config, since_s or 0.0)
        return
    with contextlib.ExitStack() as stack:
        if writes:
            stack.enter_context(reserve_board(choice, "hil board console --write", print_message))
        watch = stack.enter_context(watch_console(choice.config, exclusive=writes))
        if writes:
            # The thread may wait for stdin when the command ends.
            threading.Thread(target=send_input, args=(watch, seconds is None), daemon=True).start()
        yield from watch.iter_lines(since_s, seconds)


def iter_input() -> Iterator[str]:
    """Yield the lines of stdin. Bytes that are not UTF-8 become replacement characters."""
    for line in sys.stdin.buffer:
        yield line.decode(errors="replace")


def send_input(console: InputConsole, ends: bool) -> None:
    """Send the lines of stdin to a console.

    Args:
        ends: True to stop the console a short time after the end of stdin.
    """
    try:
        for text in iter_input():
            console.send_line(text)
    except BoardError as error:
        print_message(f"hil: {error.message}")
    if ends:
        time.sleep(OUTPUT_SECONDS)
        console.stop()


@make_command(epilog="Example: hil board provision rpi5 --image sdcard.img")
@add_board_place
@click.option("--image", type=FILE, required=True, metavar="FILE", help="Image to write.", shell_complete=complete_file)
@json_option
def provision(as_json: bool, image: Path, **settings: Any) -> int:
    """Write an image to a board with [provision] of the board's config, and check the board.

    hil reserves the board, runs the command, and waits until the board responds. Later records of the board contain the
    image's SHA-256. Exit code: 0 if the board passes the checks, 4 otherwise.
    """
    from hil.controller.devices.console.board_console import use_console
    from hil.controller.devices.console.viewing import reserve_board
    from hil.controller.devices.health import FAIL
    from hil.controller.devices.power_control.power import connect_with_retry
    from hil.controller.devices.power_control.provision import digest_image, provision_board
    from hil.controller.devices.power_control.provisioned_image import remember_image
    from hil.controller.records.commands.boards import ProvisionReport
    from hil.controller.workloads.board_checks import check_board, read_board_id

    choice = choose_place(settings)
    digest_image(image)  # report an unreadable file before the board is reserved
    start = time.monotonic()
    with use_console(choice.config, print_message) as console:
        with reserve_board(choice, "hil board provision", print_message):
            done = provision_board(choice, image, console, print_message)
        board_id = connect_with_retry(lambda: read_board_id(choice), choice.config.provision.boot_s)
        seconds = time.monotonic() - start
        remember_image(choice, done.replace(board_id=board_id))
    checks = print_checks(check_board(choice, say=print_message), quiet=as_json)
    failed = [one.name for one in checks if one.state == FAIL]
    if failed and not as_json:
        print_message(f"FAIL: {', '.join(failed)}")
    report = ProvisionReport(
        board=choice.name,
        file=done.file,
        sha256=done.sha256,
        seconds=seconds,
        boot_s=None if console is None else console.boot_s,
        ok=not failed,
        checks=checks,
        exit_code=EXIT_BOARD if failed else EXIT_OK,
    )
    lines = [f"{choice.name}: wrote {done.file} in {seconds:.1f} s", f"sha256 {done.sha256}"]
    return answer(as_json, report, *lines)

"""`hil farm lease`: exclusive use of a board for a limited time."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hil.controller.cli.commands import make_command
from hil.controller.cli.farm.board_requests import count_option, list_board_requests
from hil.controller.cli.farm.options import connect_farm, priority_option, project_option
from hil.controller.cli.farm.tables import RESERVATIONS, make_table, show, to_local_time
from hil.controller.cli.options import check_seconds, json_option
from hil.controller.cli.screen import answer, print_message
from hil.controller.cli.times import parse_duration, parse_future
from hil.controller.farm.messages import BoardRequest, Priority
from hil.controller.records.commands.farm import BoardUnreserved, LeasedBoard, ReservationList, ReservedBoard
from hil.controller.records.lab.farm import CancelledReservation, FarmReservation
from hil.core.processes import wait_or_kill
from hil.core.scratch import make_temporary_folder
from hil.errors import EXIT_OK, FarmError, UsageError

if TYPE_CHECKING:
    from hil.controller.farm.client.lease_session import LeaseSession

_LOOK_SECONDS = 0.2
_WAIT_SECONDS = 5.0
# Time for a command to exit after Ctrl-C or SIGTERM.
_GRACE_SECONDS = 10.0


@make_command(
    context_settings={"allow_interspersed_args": False},
    epilog="""\b
Examples:
  hil farm lease --select chip=a53 --for 30m -- hil bench example:digits_cnn
  hil farm lease --select chip=a53 --count 2 -- python link_test.py""",
)
@click.option(
    "--select",
    "selectors",
    multiple=True,
    metavar="SELECTOR",
    help='Board requirements: "chip=a53, mem>=1GiB"; repeatable: each value is a further board.',
)
@click.option(
    "--board",
    "boards",
    multiple=True,
    metavar="NAME",
    help="Board of the farm; repeatable: each value is a further board.",
)
@count_option
@click.option("--at", default="", metavar="TIME", help="Reserve a board for this time: 9:00, 'mon 9:00' (local time).")
@click.option("--for", "for_", default="1h", show_default=True, metavar="TIME", help="Maximum lease time: 90s, 30m.")
@priority_option
@project_option
@click.option(
    "--wait",
    "wait_s",
    default=float("inf"),
    metavar="S",
    callback=lambda context, option, value: value if value == float("inf") else check_seconds(context, option, value),
    help="Seconds to wait for a board (default: unlimited).",
)
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD...]")
def lease(
    command: tuple[str, ...],
    selectors: tuple[str, ...],
    boards: tuple[str, ...],
    count: int,
    at: str,
    for_: str,
    wait_s: float,
    priority: str,
    project: str,
    as_json: bool,
) -> int:
    """Lease boards exclusively, and run CMD with HIL_BOARD set: all hil commands in CMD use the first board.

    hil leases several boards at the same time, or none. HIL_BOARDS has the configs of all boards in order, separated by
    colons, and HIL_BOARD_NAMES their names.

    Without CMD, hil prints the path of a board config for --board, and holds the lease until Ctrl-C. With CMD, the exit
    code is that of CMD. If the lease ends first, hil terminates CMD and exits with 4. With CMD, stdout contains only
    CMD's output, even with --json.

    With --at, hil reserves a board and returns: from then on, only you can use the board. With CMD, hil waits for this
    time, and then leases the board. hil farm reservations lists and cancels reservations.
    """
    from hil.controller.farm.client.lease_session import LeaseSession, lease_order
    from hil.controller.farm.paths import choose_farm_address

    for_s = parse_duration(for_, "--for")
    if command and shutil.which(command[0]) is None:
        raise UsageError(f"command {command[0]!r} not found")
    requests = list_board_requests(boards, selectors, count)
    if at:
        if len(requests) > 1:
            raise UsageError("--at reserves a single board", hint="reserve each board with a separate command")
        selector = ", ".join(
            filter(None, (f"name={requests[0].board}" if requests[0].board else "", requests[0].selector))
        )
        reserved = _reserve(selector, at, for_s)
        if not command:
            span = f"from {to_local_time(reserved.begins_at)} to {to_local_time(reserved.ends_at)}"
            return answer(
                as_json,
                ReservedBoard(reservation=reserved),
                f"{reserved.board} is reserved for you {span} (reservation {reserved.id})",
                f"then use it with: hil farm lease --select name={reserved.board}",
            )
        _wait_until(reserved)
        requests = (BoardRequest(f"name={reserved.board}"),)
    purpose = " ".join(["hil farm lease", *command[:1]])
    order = lease_order("", purpose, for_s=for_s, priority=Priority(priority), project=project, requests=requests)
    with (
        _handle_sigterm(),
        LeaseSession(choose_farm_address(), order, wait_s=wait_s, say=print_message) as holding,
        make_temporary_folder("hil-lease-") as folder,
    ):
        holding.wait_with_progress(wait_s, print_message)
        held = holding.held
        configs = _write_configs(Path(folder), holding)
        if command:
            return _run(command, configs, holding)
        # Ctrl-C releases the lease.
        with contextlib.suppress(KeyboardInterrupt):
            boards_held = [held, *held.grant.more]
            document = LeasedBoard(
                board=held.card.name,
                job=held.grant.job,
                lease=held.grant.lease,
                config=str(configs[0]),
                boards=[one.card.name for one in boards_held],
                configs=list(map(str, configs)),
                for_s=for_s,
            )
            answer(as_json, document, *map(str, configs))
            # Flush, because readers in a pipe need the text while the lease is active.
            sys.stdout.flush()
            if not as_json:
                print_message(
                    "board leased until Ctrl-C: use this file as --board or HIL_BOARD"
                    if len(configs) == 1
                    else f"{len(configs)} boards leased until Ctrl-C: use these files as --board"
                )
            while not holding.ended(_LOOK_SECONDS):
                pass
            raise _make_lost_error(holding)
        return EXIT_OK


def _write_configs(folder: Path, holding: LeaseSession) -> list[Path]:
    """Write the configs of the leased boards and return their paths, without colons, which HIL_BOARDS cannot have."""
    configs = []
    for number, config in enumerate(holding.configs, 1):
        name = config.name if number == 1 else f"{number}-{config.name}"
        if len(holding.configs) > 1:
            name = name.replace(":", "_")
        path = folder / f"{name}.toml"
        path.write_text(config.text)
        configs.append(path)
    return configs


def _reserve(selector: str, at: str, for_s: float) -> FarmReservation:
    begin = parse_future(at, "--at").timestamp()
    with connect_farm() as farm:
        reserved: FarmReservation = farm.do("reserve", selector=selector, begin=begin, seconds=for_s)
    return reserved


def _wait_until(reserved: FarmReservation) -> None:
    """Wait for the start of a reservation. Ctrl-C ends the wait, but keeps the reservation."""
    print_message(f"{reserved.board} is reserved; waiting up to {to_local_time(reserved.begins_at)}")
    begin = datetime.fromisoformat(reserved.begins_at).timestamp()
    try:
        # Wait in short steps, because the machine may sleep in the meantime.
        while (left := begin - time.time()) > 0:
            time.sleep(min(left, _WAIT_SECONDS))
    except KeyboardInterrupt:
        print_message(f"the reservation continues: hil farm reservations --cancel {reserved.id} cancels it")
        raise


def _run(command: tuple[str, ...], configs: Sequence[Path], holding: LeaseSession) -> int:
    """Run a command with the boards. Return the exit code. Raises FarmError if the lease ends first."""
    asked = threading.Event()
    # Set a handler without exceptions: an exception during the start would leave the process running. The caller
    # restores the previous handler.
    signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    names = [holding.name, *(one.card.name for one in holding.held.grant.more)]
    boards = {
        "HIL_BOARD": str(configs[0]),
        "HIL_BOARDS": os.pathsep.join(map(str, configs)),
        "HIL_BOARD_NAMES": " ".join(names),
    }
    process = subprocess.Popen(command, env={**os.environ, **boards})
    try:
        while (code := process.poll()) is None:
            if asked.is_set():
                process.terminate()
                raise KeyboardInterrupt
            if holding.ended(_LOOK_SECONDS):
                raise _make_lost_error(holding)
        return code if code >= 0 else 128 - code
    except KeyboardInterrupt:
        # The command has also received Ctrl-C, and may need time to store results.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
        raise
    finally:
        if process.poll() is None:
            process.terminate()
            wait_or_kill(process, _GRACE_SECONDS)


def _make_lost_error(holding: LeaseSession) -> FarmError:
    return FarmError(f"the lease ended: {holding.over}", board=holding.held.card.name)


@contextlib.contextmanager
def _handle_sigterm() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C in this context, so that the board is released."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@make_command(
    epilog="""\b
Examples:
  hil farm reservations
  hil farm reservations --cancel 3"""
)
@click.option("--cancel", "number", type=click.IntRange(1, 10**18), metavar="ID", help="Cancel this reservation.")
@json_option
def reservations(number: int | None, as_json: bool) -> None:
    """List current and future reservations of boards, or cancel one. hil farm lease --at makes them."""
    with connect_farm() as farm:
        if number is not None:
            gone: CancelledReservation = farm.do("unreserve", id=number)
            text = f"reservation {number} of {gone.board} cancelled"
            answer(as_json, BoardUnreserved(cancelled=number, board=gone.board), text)
            return
        rows: list[FarmReservation] = farm.ask("reservations")
    answer(as_json, ReservationList(reservations=rows), show=lambda: show(make_table(RESERVATIONS, rows)))

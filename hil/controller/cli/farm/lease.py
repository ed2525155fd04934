"""`hil farm lease`: exclusive use of a board for a limited time."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hil.controller.cli.commands import make_command
from hil.controller.cli.farm.options import priority_option, project_option, select_option
from hil.controller.cli.options import check_seconds, json_option, parse_duration
from hil.controller.cli.screen import answer, print_message
from hil.controller.farm.messages import Priority
from hil.controller.records.commands.farm import LeasedBoard
from hil.core.processes import wait_or_kill
from hil.core.scratch import make_temporary_folder
from hil.errors import EXIT_OK, FarmError, UsageError

if TYPE_CHECKING:
    from hil.controller.farm.client.lease_session import LeaseSession

_LOOK_SECONDS = 0.2
# Time for a command to exit after Ctrl-C or SIGTERM.
_GRACE_SECONDS = 10.0


@make_command(
    context_settings={"allow_interspersed_args": False},
    epilog="Example: hil farm lease --select chip=a53 --for 30m -- hil bench example:digits_cnn",
)
@select_option
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
    command: tuple[str, ...], selector: str, for_: str, wait_s: float, priority: str, project: str, as_json: bool
) -> int:
    """Lease a board exclusively, and run CMD with HIL_BOARD set: all hil commands in CMD use the board.

    Without CMD, hil prints the path of a board config for --board, and holds the lease until Ctrl-C. With CMD, the exit
    code is that of CMD. If the lease ends first, hil terminates CMD and exits with 4. With CMD, stdout contains only
    CMD's output, even with --json.
    """
    from hil.controller.farm.client.lease_session import LeaseSession, lease_order
    from hil.controller.farm.paths import choose_farm_address

    for_s = parse_duration(for_, "--for")
    if command and shutil.which(command[0]) is None:
        raise UsageError(f"command {command[0]!r} not found")
    purpose = " ".join(["hil farm lease", *command[:1]])
    order = lease_order(selector, purpose, for_s=for_s, priority=Priority(priority), project=project)
    with (
        _handle_sigterm(),
        LeaseSession(choose_farm_address(), order, wait_s=wait_s, say=print_message) as holding,
        make_temporary_folder("hil-lease-") as at,
    ):
        holding.wait_with_progress(wait_s, print_message)
        held = holding.held
        config = Path(at) / f"{held.card.name}.toml"
        config.write_text(holding.config.text)
        if command:
            return _run(command, config, holding)
        # Ctrl-C releases the lease.
        with contextlib.suppress(KeyboardInterrupt):
            document = LeasedBoard(
                board=held.card.name, job=held.grant.job, lease=held.grant.lease, config=str(config), for_s=for_s
            )
            answer(as_json, document, str(config))
            # Flush, because readers in a pipe need the text while the lease is active.
            sys.stdout.flush()
            if not as_json:
                print_message("board leased until Ctrl-C: use this file as --board or HIL_BOARD")
            while not holding.ended(_LOOK_SECONDS):
                pass
            raise _make_lost_error(holding)
        return EXIT_OK


def _run(command: tuple[str, ...], config: Path, holding: LeaseSession) -> int:
    """Run a command with the board. Return the exit code. Raises FarmError if the lease ends first."""
    asked = threading.Event()
    # Set a handler without exceptions: an exception during the start would leave the process running. The caller
    # restores the previous handler.
    signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    process = subprocess.Popen(command, env={**os.environ, "HIL_BOARD": str(config)})
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

"""`hil farm lease`: a board to oneself for a while."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hil.controller.cli.commands import command
from hil.controller.cli.farm_options import priority_option, project_option, select_option
from hil.controller.cli.options import json_option, seconds
from hil.controller.cli.screen import answer, say
from hil.controller.farm.messages import Priority
from hil.controller.farm.wording import UNITS
from hil.core.processes import wait_or_kill
from hil.core.scratch import temporary_folder
from hil.errors import EXIT_OK, FarmError, UsageError

if TYPE_CHECKING:
    from hil.controller.farm.lease_session import LeaseSession

_LOOK_S = 0.2
# So long a command may take to end by itself, after Ctrl-C or a SIGTERM.
_GRACE_S = 10.0


def duration(text: str) -> float:
    """``30m``, ``1h30m``, ``90`` -> seconds; a UsageError for what is no time above 0."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    total = sum(float(number) * UNITS[unit or "s"] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != text or not total > 0:
        raise UsageError(f"--for {text!r} is no time", hint="for example 90s, 30m, 1h30m")
    return total


@command(
    context_settings={"allow_interspersed_args": False},
    epilog="Example: hil farm lease --select chip=a53 --for 30m -- hil bench examples/digits/digits_cnn.onnx",
)
@select_option
@click.option("--for", "for_", default="1h", show_default=True, metavar="TIME", help="Most time to have it: 90s, 30m.")
@priority_option
@project_option
@click.option(
    "--wait",
    "wait_s",
    default=float("inf"),
    metavar="S",
    callback=lambda context, option, value: value if value == float("inf") else seconds(context, option, value),
    help="How long to wait for a board (default: as long as it takes).",
)
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD...]")
def lease(
    command: tuple[str, ...], selector: str, for_: str, wait_s: float, priority: str, project: str, as_json: bool
) -> int:
    """Have a board to yourself, and run CMD with it: HIL_BOARD names it, so every hil command in CMD uses it.

    Without CMD the path of a board config is printed, for --board, and the board is yours until Ctrl-C. The exit code
    is CMD's, or 4 when the lease ended before it did: then CMD is ended. With CMD stdout is CMD's alone, --json or not.
    """
    from hil.controller.farm.lease_session import LeaseSession, lease_order
    from hil.controller.farm.paths import farm_address

    for_s = duration(for_)
    if command and shutil.which(command[0]) is None:
        raise UsageError(f"there is no command {command[0]!r}")
    purpose = " ".join(["hil farm lease", *command[:1]])
    order = lease_order(selector, purpose, for_s=for_s, priority=Priority(priority), project=project)
    with _terminable(), LeaseSession(farm_address(), order) as holding, temporary_folder("hil-lease-") as at:
        holding.wait_told(wait_s, say)
        held = holding.held
        config = Path(at) / f"{held.card.name}.toml"
        config.write_text(holding.config.text)
        if command:
            return _run(command, config, holding)
        # Ctrl-C is how one gives it back.
        with contextlib.suppress(KeyboardInterrupt):
            document = {"board": held.card.name, "job": held.grant.job, "lease": held.grant.lease}
            answer(as_json, {**document, "config": str(config), "for_s": for_s}, str(config))
            # Whoever reads it wants it while the lease lasts.
            sys.stdout.flush()
            if not as_json:
                say("it is yours until Ctrl-C: --board, or HIL_BOARD, with this file")
            while not holding.ended(_LOOK_S):
                pass
            raise _lost(holding)
        return EXIT_OK


def _run(command: tuple[str, ...], config: Path, holding: LeaseSession) -> int:
    """Run a command with the board; its exit code, or a FarmError where the lease ended first."""
    asked = threading.Event()
    # An exception while it is being started would leave it behind; the handler before is set again by our caller.
    signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    process = subprocess.Popen(command, env={**os.environ, "HIL_BOARD": str(config)})
    try:
        while (code := process.poll()) is None:
            if asked.is_set():
                process.terminate()
                raise KeyboardInterrupt
            if holding.ended(_LOOK_S):
                raise _lost(holding)
        return code if code >= 0 else 128 - code
    except KeyboardInterrupt:
        # It heard the Ctrl-C as well, and may have something to store.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        raise
    finally:
        if process.poll() is None:
            process.terminate()
            wait_or_kill(process, _GRACE_S)


def _lost(holding: LeaseSession) -> FarmError:
    return FarmError(f"the lease ended: {holding.over}", board=holding.held.card.name)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """A SIGTERM ends what is inside as Ctrl-C does: the board is given back."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

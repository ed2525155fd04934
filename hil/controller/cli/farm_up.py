"""`hil farm up` and `down`: a whole farm on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click

from hil.controller.cli.options import json_option
from hil.controller.cli.screen import answer
from hil.core.processes import module_command

_FILE = click.Path(path_type=Path, dir_okay=False)
_DETACH_S = 180.0


@click.command(epilog="Example: hil farm up --sim 4 --board rpi5 --detach")
@click.option("--sim", "sims", type=click.IntRange(min=0), default=0, metavar="N", help="So many simulated boards.")
@click.option(
    "--board", "boards", multiple=True, metavar="NAME|FILE", help="A board of this machine, by its config. Repeats."
)
@click.option("--site", default="", metavar="S", help="Where its boards are, as selectors call it.")
@click.option("--db", default="", metavar="URL", help="A PostgreSQL (default: HIL_FARM_DB, else one of our own).")
@click.option(
    "--listen",
    default="",
    metavar="HOST:PORT",
    help="Serve users and hosts elsewhere too, over TLS; loopback may do without.",
)
@click.option("--tls-cert", type=_FILE, metavar="PEM", help="The certificate for --listen.")
@click.option("--tls-key", type=_FILE, metavar="PEM", help="Its key.")
@click.option("--metrics", default="", metavar="[HOST]:PORT", help="Where Prometheus finds the farm's numbers.")
@click.option("--detach", is_flag=True, help="Return when it serves and its boards are checked; hil farm down ends it.")
@json_option
def up(detach: bool, as_json: bool, **settings: Any) -> int:
    """Run a farm on this machine: a database, a gateway, and these boards; Ctrl-C ends it.

    Everything is kept in HIL_FARM_HOME. Whatever of it dies is started again; killed and started anew it goes on
    where it was.
    """
    from hil.controller.farm.local_farm import UpOptions
    from hil.controller.farm.paths import farm_home
    from hil.errors import UsageError

    wishes = UpOptions(**settings)
    if bool(wishes.tls_cert) != bool(wishes.tls_key):
        raise UsageError("--tls-cert and --tls-key go together")
    if as_json and not detach:
        raise UsageError("--json tells what --detach has started", hint="hil farm up --detach --json")
    return _detached(farm_home(), wishes, as_json) if detach else _here(farm_home(), wishes)


def _here(home: Path, wishes: Any) -> int:
    """Until Ctrl-C, SIGTERM or SIGHUP."""
    from hil.controller.farm.local_farm import LocalFarm

    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: over.set())
    with LocalFarm(home, wishes, _say, over) as farm:
        _say("the farm is up; Ctrl-C ends it" if sys.stderr.isatty() else "the farm is up")
        farm.watch()
        _say("ending")
    return 0


def _say(text: str) -> None:
    click.echo(f"{time.strftime('%H:%M:%S')}  {text}", err=True)


def _detached(home: Path, wishes: Any, as_json: bool) -> int:
    """In a process of its own; waited for until it serves and has looked at its boards."""
    from hil.controller.farm.local_farm import LOGS, ask, prepare_home, sheet_of
    from hil.controller.farm.paths import DB_VARIABLE

    prepare_home(home)
    log = home / LOGS / "up.log"
    command = module_command("hil.controller.cli.main", "farm", "up", *wishes.host_words())
    command += wishes.gateway_words()
    # A database's URL may hold a password, and others can read a command line.
    environment = {**os.environ, **({DB_VARIABLE: wishes.db} if wishes.db else {})}
    with log.open("ab") as file:
        begun = file.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, env=environment
        )
    deadline = time.monotonic() + _DETACH_S
    try:
        while True:
            if (code := process.poll()) is not None:
                said = log.read_bytes()[begun:].decode(errors="replace").rstrip()
                if as_json:
                    error = {"kind": "FarmError", "message": "the farm did not start", "detail": said}
                    answer(True, {"error": error, "exit_code": code or 1})
                click.echo(said, err=True)
                return code or 1
            sheet = sheet_of(home) or {}
            serves = sheet.get("pid") == process.pid and sheet["serving"]
            if serves and (sheet["ready"] or time.monotonic() > deadline):
                break
            time.sleep(0.05)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    boards = Counter(board["state"] for board in ask(home, "boards"))
    told = ", ".join(f"{count} {state}" for state, count in sorted(boards.items())) or "none"
    document = {**sheet, "home": str(home), "boards": dict(boards)}
    answer(as_json, document, f"the farm serves at {sheet['address']}, boards: {told}")
    if not (as_json or sheet["ready"]):
        hint = f"see hil farm events, and {home / LOGS / 'host.log'}"
        click.echo(f"not all of its {wishes.count} boards have answered yet: {hint}", err=True)
    return 0


@click.command(epilog="Example: hil farm down")
@json_option
def down(as_json: bool) -> None:
    """End the farm of HIL_FARM_HOME that runs on this machine; its jobs go on when it is up again."""
    from hil.controller.farm.local_farm import end_farm
    from hil.controller.farm.paths import farm_home

    ended = end_farm(farm_home())
    answer(as_json, {"ended": ended}, "the farm is down" if ended else "no farm is up here")

"""`hil farm up`, `down`, `gateway` and `host`: run the processes of a farm."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.commands import make_command
from hil.controller.cli.options import combine_options, json_option
from hil.controller.cli.screen import answer, print_message
from hil.controller.cli.usage.candidates import complete_boards, complete_faults
from hil.controller.records.base import make_record
from hil.controller.records.commands.errors import ErrorDetails, ErrorDocument
from hil.controller.records.commands.farm import StartedFarm, StoppedFarm
from hil.core.files import read_file
from hil.core.processes import make_module_command
from hil.errors import EXIT_USAGE, UsageError

if TYPE_CHECKING:
    from hil.controller.farm.gateway.server import GatewayConfig
    from hil.controller.farm.local.local_farm import UpOptions

_PEM = click.Path(exists=True, dir_okay=False, path_type=Path)
_DETACH_SECONDS = 180.0
_sims = click.option("--sim", "sims", type=click.IntRange(min=0), default=0, metavar="N", help="Simulate N boards.")
_site = click.option(
    "--site", default="", metavar="S", help="Location of the boards; the farm shows it as their label."
)
_commands = click.option(
    "--allow-commands",
    is_flag=True,
    help="Run commands of users with the right `commands`, with all permissions of this user account.",
)
_gateway_options = combine_options(
    click.option("--tls-cert", type=_PEM, metavar="PEM", help="Certificate for --listen; required beyond loopback."),
    click.option("--tls-key", type=_PEM, metavar="PEM", help="Private key of the certificate."),
    click.option("--metrics", default="", metavar="[HOST]:PORT", help="Address to serve Prometheus metrics."),
)


@make_command(epilog="Example: hil farm up --sim 4 --board rpi5 --detach")
@_sims
@click.option(
    "--board",
    "boards",
    multiple=True,
    metavar="NAME|FILE",
    help="Name or config of a board of this machine. Repeatable.",
    shell_complete=complete_boards,
)
@_site
@click.option("--db", default="", metavar="URL", help="PostgreSQL URL (default: HIL_FARM_DB, or a local database).")
@click.option(
    "--listen", default="", metavar="HOST:PORT", help="Also serve users and hosts on other machines, over TLS."
)
@_gateway_options
@_commands
@click.option("--detach", is_flag=True, help="Return when the farm is up and the boards are checked.")
@json_option
def up(detach: bool, as_json: bool, **settings: Any) -> int:
    """Run a farm on this machine: a database, a gateway, and these boards. Stop it with Ctrl-C or hil farm down.

    The farm stores its data in HIL_FARM_HOME. Processes that die are restarted. After a kill, the next start continues
    from the stored state.
    """
    from hil.controller.farm.local.local_farm import LocalFarm, UpOptions
    from hil.controller.farm.paths import get_farm_home
    from hil.protocol.listening import check_tls_files

    wishes = UpOptions(**settings)
    listens = [wishes.listen or "unix:"]  # the default is the farm's Unix socket
    check_tls_files(cert=wishes.tls_cert, key=wishes.tls_key, ca_needs_cert=True, listens=listens)
    if as_json and not detach:
        raise UsageError("--json requires --detach", hint="hil farm up --detach --json")
    if detach:
        return _start_detached(get_farm_home(), wishes, as_json)

    def report_progress(text: str) -> None:
        print_message(f"{time.strftime('%H:%M:%S')}  {text}")

    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: over.set())
    with LocalFarm(get_farm_home(), wishes, report_progress, over) as farm:
        report_progress("the farm is up; stop it with Ctrl-C" if sys.stderr.isatty() else "the farm is up")
        farm.watch()
        report_progress("ending")
    return 0


def _start_detached(home: Path, wishes: UpOptions, as_json: bool) -> int:
    """Start the farm in a separate process. Wait until it serves and has checked its boards."""
    from hil.controller.farm.local.local_farm import LOGS, ask, prepare_home
    from hil.controller.farm.paths import DB_VARIABLE, read_sheet

    prepare_home(home)
    log = home / LOGS / "up.log"
    command = make_module_command(
        "hil.controller.cli.main", "farm", "up", *wishes.list_host_arguments(), *wishes.list_gateway_arguments()
    )
    # A database URL may contain a password, and other users can read command lines.
    environment = {**os.environ, **({DB_VARIABLE: wishes.db} if wishes.db else {})}
    with log.open("ab") as file:
        begun = file.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, env=environment
        )
    deadline = time.monotonic() + _DETACH_SECONDS
    try:
        while True:
            if (code := process.poll()) is not None:
                printed = read_file(log)[begun:].decode(errors="replace").rstrip()
                return _report_failed_start("FarmError", printed, code or 1, as_json)
            sheet = read_sheet(home) or {}
            is_own = sheet.get("pid") == process.pid
            if is_own and (printed := sheet.get("usage_error", "")):
                process.terminate()
                process.wait()
                return _report_failed_start("UsageError", printed, EXIT_USAGE, as_json)
            serves = is_own and sheet["serving"]
            if serves and (sheet["ready"] or time.monotonic() > deadline):
                break
            time.sleep(0.05)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    found = ask(home, "boards")
    boards = Counter(board.state for board in found)
    states = ", ".join(f"{count} {state}" for state, count in sorted(boards.items())) or "none"
    if not (as_json or sheet["ready"]):
        hint = f"see hil farm events, and {home / LOGS / 'host.log'}"
        print_message(f"not all {wishes.count} boards have responded yet: {hint}")
    if not as_json:
        for board in found:
            if board.reason:
                print_message(f"board {board.name} {board.state}: {board.reason}")
    sheet.pop("usage_error", None)
    document = make_record({**sheet, "home": str(home), "boards": dict(boards)}, StartedFarm)
    return answer(as_json, document, f"the farm serves at {sheet['address']}, boards: {states}")


def _report_failed_start(kind: str, printed: str, code: int, as_json: bool) -> int:
    """Report the error of a farm that did not start. Return the exit code."""
    print_message(printed)
    message = "the farm did not start"
    error = ErrorDetails(kind=kind, message=message, detail=printed, outcome="", hint="", stage="", board="")
    return answer(as_json, ErrorDocument(error=error, exit_code=code))


@make_command(epilog="Example: hil farm down")
@json_option
def down(as_json: bool) -> None:
    """Stop the farm of HIL_FARM_HOME on this machine. Its jobs continue when it restarts."""
    from hil.controller.farm.local.local_farm import end_farm
    from hil.controller.farm.paths import get_farm_home

    ended = end_farm(get_farm_home())
    answer(as_json, StoppedFarm(ended=ended), "the farm is down" if ended else "no farm is running here")


@make_command(epilog="Example: hil farm gateway --listen 0.0.0.0:7070 --tls-cert farm.pem --tls-key farm.key")
@click.option("--db", default="", metavar="URL", help="PostgreSQL URL of the farm (default: HIL_FARM_DB).")
@click.option("--listen", multiple=True, metavar="unix:PATH|HOST:PORT", help="Address to serve. Repeatable.")
@_gateway_options
@click.option("--advertise", default="", metavar="HOST:PORT", help="Address that hosts use to reach this gateway.")
@click.option("--artifacts", default="", metavar="DIR|URL", help="File storage (default: in HIL_FARM_HOME).")
def gateway(db: str, listen: tuple[str, ...], artifacts: str, **settings: Any) -> int:
    """Run a gateway for the users and hosts of a farm. Multiple gateways may share one database.

    Prints a JSON line when it is ready, and JSON logs to stderr. Stop it with Ctrl-C or SIGTERM.
    """
    from hil.controller.farm.local.local_farm import need_packages

    need_packages()
    from hil.controller.farm.gateway.artifacts import ARTIFACTS_VARIABLE
    from hil.controller.farm.gateway.server import GatewayConfig
    from hil.controller.farm.oidc.oidc_settings import load_oidc
    from hil.controller.farm.paths import DB_VARIABLE, get_farm_home, get_socket_path
    from hil.controller.farm.settings import load_history, load_settings
    from hil.controller.farm.telemetry import log_json
    from hil.controller.farm.webhooks.webhook_settings import load_webhooks

    home = get_farm_home()
    db = db or os.environ.get(DB_VARIABLE, "")
    if not db:
        raise UsageError(
            "no database specified for the gateway", hint=f"use --db or {DB_VARIABLE}; hil farm up includes a database"
        )
    config = GatewayConfig(
        db=db,
        listen=listen or (f"unix:{get_socket_path(home)}",),
        artifacts=artifacts or os.environ.get(ARTIFACTS_VARIABLE, "") or str(home / "artifacts"),
        settings=load_settings(home / "farm.toml"),
        history=load_history(home / "farm.toml", db),
        webhooks=load_webhooks(home / "farm.toml"),
        oidc=load_oidc(home / "farm.toml"),
        **settings,
    )
    log_json()
    asyncio.run(_serve(config))
    return 0


async def _serve(config: GatewayConfig) -> None:
    """Serve until SIGINT or SIGTERM."""
    from hil.controller.farm.gateway.server import run_gateway

    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    async with run_gateway(config) as gateway:
        print(json.dumps({"addresses": gateway.addresses, "metrics": gateway.metrics, "pid": os.getpid()}), flush=True)
        await over.wait()
    sys.stdout.flush()


@make_command(epilog="Example: hil farm host --site berlin --board rpi5 --board ./board_configs/jetson.toml")
@_site
@click.option(
    "--board",
    "boards",
    multiple=True,
    metavar="NAME|FILE",
    help="Board config (default: all configs with an address). Repeatable.",
    shell_complete=complete_boards,
)
@_sims
@click.option(
    "--sim-fault",
    "faults",
    multiple=True,
    metavar="FAULT",
    help="Fault of the simulated boards (docs/simulator.md). Repeatable.",
    shell_complete=complete_faults,
)
@_commands
@click.option(
    "--name", default="", metavar="HOST", help="Host name in the farm (default: the machine's name with a suffix)."
)
def host(sims: int, **given: Any) -> int:
    """Serve boards to a farm until Ctrl-C: connect each board to a gateway and run its jobs.

    HIL_FARM specifies the gateways (HOST:PORT,...), HIL_FARM_TOKEN a token with role `host`, and HIL_FARM_CA the CA of
    their certificates. The default is the farm of this machine. All connections are outgoing, so the host may be behind
    a firewall.
    """
    from hil.controller.farm.host.host import serve
    from hil.controller.farm.paths import choose_farm_address, get_farm_home

    serve(choose_farm_address(), get_farm_home(), simulators=sims, **given, say=print_message)
    return 0

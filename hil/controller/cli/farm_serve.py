"""`hil farm up`, `down`, `gateway` and `host`: the processes that a farm is made of."""

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

from hil.controller.cli.commands import command
from hil.controller.cli.options import json_option, options
from hil.controller.cli.screen import answer, say
from hil.core.processes import module_command
from hil.errors import UsageError

if TYPE_CHECKING:
    from hil.controller.farm.gateway.server import GatewayConfig
    from hil.controller.farm.local_farm import UpOptions

_PEM = click.Path(exists=True, dir_okay=False, path_type=Path)
_DETACH_S = 180.0
_sims = click.option("--sim", "sims", type=click.IntRange(min=0), default=0, metavar="N", help="Simulate N boards.")
_site = click.option("--site", default="", metavar="S", help="Where the boards are: a label, and shown with them.")
_gateway_options = options(
    click.option("--tls-cert", type=_PEM, metavar="PEM", help="The certificate for --listen; needed beyond loopback."),
    click.option("--tls-key", type=_PEM, metavar="PEM", help="Its key."),
    click.option("--metrics", default="", metavar="[HOST]:PORT", help="Where Prometheus finds the farm's numbers."),
)


@command(epilog="Example: hil farm up --sim 4 --board rpi5 --detach")
@_sims
@click.option(
    "--board", "boards", multiple=True, metavar="NAME|FILE", help="A board of this machine, by its config. Repeats."
)
@_site
@click.option("--db", default="", metavar="URL", help="A PostgreSQL (default: HIL_FARM_DB, else one of our own).")
@click.option("--listen", default="", metavar="HOST:PORT", help="Serve users and hosts elsewhere too, over TLS.")
@_gateway_options
@click.option("--detach", is_flag=True, help="Return when it serves and its boards are checked; hil farm down ends it.")
@json_option
def up(detach: bool, as_json: bool, **settings: Any) -> int:
    """Run a farm on this machine: a database, a gateway, and these boards; Ctrl-C ends it.

    Everything is kept in HIL_FARM_HOME. Whatever of it dies is started again; killed and started anew it goes on
    where it was.
    """
    from hil.controller.farm.local_farm import LocalFarm, UpOptions
    from hil.controller.farm.paths import farm_home
    from hil.protocol.listening import check_tls_files

    wishes = UpOptions(**settings)
    listens = [wishes.listen or "unix:"]  # without a port of the user's, on the farm's own socket alone
    check_tls_files(cert=wishes.tls_cert, key=wishes.tls_key, ca_needs_cert=True, listens=listens)
    if as_json and not detach:
        raise UsageError("--json tells what --detach has started", hint="hil farm up --detach --json")
    if detach:
        return _detached(farm_home(), wishes, as_json)

    def tell(text: str) -> None:
        say(f"{time.strftime('%H:%M:%S')}  {text}")

    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: over.set())
    with LocalFarm(farm_home(), wishes, tell, over) as farm:
        tell("the farm is up; Ctrl-C ends it" if sys.stderr.isatty() else "the farm is up")
        farm.watch()
        tell("ending")
    return 0


def _detached(home: Path, wishes: UpOptions, as_json: bool) -> int:
    """In a process of its own; waited for until it serves and has looked at its boards."""
    from hil.controller.farm.local_farm import LOGS, ask, prepare_home, sheet_of
    from hil.controller.farm.paths import DB_VARIABLE

    prepare_home(home)
    log = home / LOGS / "up.log"
    command = module_command(
        "hil.controller.cli.main", "farm", "up", *wishes.host_arguments(), *wishes.gateway_arguments()
    )
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
                printed = log.read_bytes()[begun:].decode(errors="replace").rstrip()
                say(printed)
                error = {"kind": "FarmError", "message": "the farm did not start", "detail": printed}
                return answer(as_json, {"error": error, "exit_code": code or 1})
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
    states = ", ".join(f"{count} {state}" for state, count in sorted(boards.items())) or "none"
    if not (as_json or sheet["ready"]):
        hint = f"see hil farm events, and {home / LOGS / 'host.log'}"
        say(f"not all of its {wishes.count} boards have answered yet: {hint}")
    document = {**sheet, "home": str(home), "boards": dict(boards)}
    return answer(as_json, document, f"the farm serves at {sheet['address']}, boards: {states}")


@command(epilog="Example: hil farm down")
@json_option
def down(as_json: bool) -> None:
    """End the farm of HIL_FARM_HOME that runs on this machine; its jobs go on when it is up again."""
    from hil.controller.farm.local_farm import end_farm
    from hil.controller.farm.paths import farm_home

    ended = end_farm(farm_home())
    answer(as_json, {"ended": ended}, "the farm is down" if ended else "no farm is up here")


@command(epilog="Example: hil farm gateway --listen 0.0.0.0:7070 --tls-cert farm.pem --tls-key farm.key")
@click.option("--db", default="", metavar="URL", help="The farm's PostgreSQL (default: HIL_FARM_DB).")
@click.option("--listen", multiple=True, metavar="unix:PATH|HOST:PORT", help="Where to serve. Repeats.")
@_gateway_options
@click.option("--advertise", default="", metavar="HOST:PORT", help="Where hosts reach this very gateway.")
@click.option("--artifacts", default="", metavar="DIR|URL", help="Where files are kept (default: in HIL_FARM_HOME).")
def gateway(db: str, listen: tuple[str, ...], artifacts: str, **settings: Any) -> int:
    """Run a gateway: all that users and hosts of a farm talk to. Several may serve one database.

    Prints one JSON line when it serves; logs, as JSON, go to stderr. Ctrl-C or SIGTERM ends it.
    """
    from hil.controller.farm.local_farm import need_packages

    need_packages()
    from hil.controller.farm.gateway.artifacts import ARTIFACTS_VARIABLE
    from hil.controller.farm.gateway.server import GatewayConfig
    from hil.controller.farm.paths import DB_VARIABLE, farm_home, socket_of
    from hil.controller.farm.settings import load_settings
    from hil.controller.farm.telemetry import log_json

    home = farm_home()
    db = db or os.environ.get(DB_VARIABLE, "")
    if not db:
        raise UsageError("a gateway needs a database", hint=f"--db or {DB_VARIABLE}; hil farm up brings its own")
    config = GatewayConfig(
        db=db,
        listen=listen or (f"unix:{socket_of(home)}",),
        artifacts=artifacts or os.environ.get(ARTIFACTS_VARIABLE, "") or str(home / "artifacts"),
        settings=load_settings(home / "farm.toml"),
        **settings,
    )
    log_json()
    asyncio.run(_serve(config))
    return 0


async def _serve(config: GatewayConfig) -> None:
    """Until SIGINT or SIGTERM."""
    from hil.controller.farm.gateway.server import serving

    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    async with serving(config) as gateway:
        print(json.dumps({"addresses": gateway.addresses, "metrics": gateway.metrics, "pid": os.getpid()}), flush=True)
        await over.wait()
    sys.stdout.flush()


@command(epilog="Example: hil farm host --site berlin --board rpi5 --board ./board_configs/jetson.toml")
@_site
@click.option(
    "--board",
    "boards",
    multiple=True,
    metavar="NAME|FILE",
    help="A board's config (default: every one here that has an address). Repeats.",
)
@_sims
@click.option(
    "--sim-fault",
    "faults",
    multiple=True,
    metavar="FAULT",
    help="Of the simulated boards (docs/simulator.md). Repeats.",
)
@click.option(
    "--name", default="", metavar="HOST", help="What the host is called (default: the machine's name and a mark)."
)
def host(sims: int, **given: Any) -> int:
    """Serve boards to a farm, until Ctrl-C: attend one of its gateways for each of them, and do what they are given.

    HIL_FARM names the gateways (HOST:PORT,...), HIL_FARM_TOKEN a token of the role `host`, HIL_FARM_CA the authority of
    their certificates; without them it is the farm of this machine. The host calls them, and nobody calls the host: it
    may stand behind any firewall.
    """
    from hil.controller.farm.host.host import serve
    from hil.controller.farm.paths import farm_address, farm_home

    serve(farm_address(), farm_home(), simulators=sims, **given, say=say)
    return 0

"""`hil farm gateway`: what users and hosts of a farm talk to."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hil.controller.farm.gateway.server import GatewayConfig

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(epilog="Example: hil farm gateway --listen 0.0.0.0:7070 --tls-cert farm.pem --tls-key farm.key")
@click.option("--db", default="", metavar="URL", help="The farm's PostgreSQL (default: HIL_FARM_DB).")
@click.option("--listen", multiple=True, metavar="unix:PATH|HOST:PORT", help="Where to serve. Repeats.")
@click.option("--tls-cert", type=_FILE, metavar="PEM", help="The certificate; needed beyond this machine.")
@click.option("--tls-key", type=_FILE, metavar="PEM", help="Its key.")
@click.option("--metrics", default="", metavar="[HOST]:PORT", help="Where Prometheus finds the farm's numbers.")
@click.option("--advertise", default="", metavar="HOST:PORT", help="Where hosts reach this very gateway.")
@click.option("--artifacts", default="", metavar="DIR|URL", help="Where files are kept (default: in HIL_FARM_HOME).")
def gateway(
    db: str,
    listen: tuple[str, ...],
    tls_cert: Path | None,
    tls_key: Path | None,
    metrics: str,
    advertise: str,
    artifacts: str,
) -> int:
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
    from hil.errors import UsageError

    home = farm_home()
    db = db or os.environ.get(DB_VARIABLE, "")
    if not db:
        raise UsageError("a gateway needs a database", hint=f"--db or {DB_VARIABLE}; hil farm up brings its own")
    if bool(tls_cert) != bool(tls_key):
        raise UsageError("--tls-cert and --tls-key go together")
    config = GatewayConfig(
        db=db,
        listen=listen or (f"unix:{socket_of(home)}",),
        artifacts=artifacts or os.environ.get(ARTIFACTS_VARIABLE, "") or str(home / "artifacts"),
        tls_cert=tls_cert,
        tls_key=tls_key,
        metrics=metrics,
        advertise=advertise,
        settings=load_settings(home / "farm.toml"),
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

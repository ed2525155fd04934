"""`hil farm host`: the boards of this machine, served to a farm."""

from __future__ import annotations

import sys
from typing import Any

import click


@click.command(epilog="Example: hil farm host --site berlin --board rpi5 --board ./board_configs/jetson.toml")
@click.option("--site", default="", metavar="S", help="Where the boards are: a label, and shown with them.")
@click.option(
    "--board",
    "boards",
    multiple=True,
    metavar="NAME|FILE",
    help="A board's config (default: every one here that has an address). Repeats.",
)
@click.option("--sim", "simulators", type=click.IntRange(min=0), default=0, metavar="N", help="Simulate N boards.")
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
def host(**given: Any) -> int:
    """Serve boards to a farm, until Ctrl-C: attend one of its gateways for each of them, and do what they are given.

    HIL_FARM names the gateways (HOST:PORT,...), HIL_FARM_TOKEN a token of the role `host`, HIL_FARM_CA the authority of
    their certificates; without them it is the farm of this machine. The host calls them, and nobody calls the host: it
    may stand behind any firewall.
    """
    from hil.controller.farm.host.host import serve
    from hil.controller.farm.paths import farm_address, farm_home

    serve(farm_address(), farm_home(), **given, say=_say)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

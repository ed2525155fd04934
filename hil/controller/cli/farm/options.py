"""Shared parts of the farm commands: options and the connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hil.controller.cli.screen import print_message
from hil.controller.farm.messages import Priority

if TYPE_CHECKING:
    from hil.controller.farm.client.client import FarmClient

_WANTED = 'Board requirements: "chip=a53, mem>=1GiB"'
# The option --select for commands with multiple targets.
selects_option = click.option(
    "--select", "selector", multiple=True, metavar="SELECTOR", help=f"{_WANTED}; repeatable: each value is a target."
)
priority_option = click.option(
    "--priority",
    type=click.Choice([one.value for one in Priority]),
    default=Priority.NORMAL.value,
    show_default=True,
    help="Priority class in the queue.",
)
project_option = click.option("--project", default="", metavar="P", help="Project of the job (default: the token's).")


def connect_farm() -> FarmClient:
    """Return a client for the farm in the environment variables, or for the local farm."""
    from hil.controller.farm.client.client import RESTART_SECONDS, FarmClient
    from hil.controller.farm.paths import choose_farm_address

    return FarmClient(choose_farm_address(), restart_s=RESTART_SECONDS, say=print_message)

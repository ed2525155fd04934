"""What several verbs of the farm share: options, the units of time that they take, and the connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hil.controller.farm.messages import Priority

if TYPE_CHECKING:
    from hil.controller.farm.client import FarmClient

_WANTED = 'What the board must be: "chip=a53, mem>=1GiB"'
select_option = click.option("--select", "selector", default="", metavar="SELECTOR", help=f"{_WANTED}.")
# The same where each that is named is a target.
selects_option = click.option(
    "--select", "selector", multiple=True, metavar="SELECTOR", help=f"{_WANTED}; repeats: each is a target."
)
priority_option = click.option(
    "--priority",
    type=click.Choice([one.value for one in Priority]),
    default=Priority.NORMAL.value,
    show_default=True,
    help="The class in the queue.",
)
project_option = click.option(
    "--project", default="", metavar="P", help="Whom it is counted for (default: the token's)."
)


def connected() -> FarmClient:
    """Return a client of the farm that the environment names, else of this machine's own."""
    from hil.controller.farm.client import FarmClient
    from hil.controller.farm.paths import farm_address

    return FarmClient(farm_address())

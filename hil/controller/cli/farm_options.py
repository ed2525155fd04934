"""Options that several verbs of the farm share, and the units of time that they take."""

from __future__ import annotations

import click

from hil.controller.farm.messages import Priority

# In seconds.
UNITS = {"w": 7 * 86400, "d": 86400, "h": 3600, "m": 60, "s": 1}

select_option = click.option(
    "--select", "selector", default="", metavar="SELECTOR", help='What the board must be: "chip=a53, mem>=1GiB".'
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

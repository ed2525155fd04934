"""Links: how the controller gets to an agent.

A link is opened by what the user wrote after ``--board`` and gives a :class:`hil.controller.client.Target`. Kinds that
come with hil are below; a package adds one under the entry-point group ``hil.links``: prefix -> a function
``(address, config) -> Link``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import entry_points

from hil.boards import BoardConfig
from hil.controller.client import Target
from hil.errors import UsageError


@dataclass
class Link:
    """A way to an agent, as long as it is open.

    Attributes:
        target: where the agent is reached.
        close: ends what the link started.
        log: what the far side's process printed so far, for an error's detail.
    """

    target: Target
    close: Callable[[], None] = field(default=lambda: None)
    log: Callable[[], str] = field(default=lambda: "")


def open_link(address: str, config: BoardConfig, faults: tuple[str, ...] = ()) -> Link:
    """Open the link for an address, or start the simulator where the config says so.

    Args:
        address: ``unix:PATH``, ``HOST:PORT``, a prefix of a registered kind, or "" for the config's own.
        config: the board's config.
        faults: for a simulator: faults to switch on.

    Raises:
        UsageError: the address is none that a link takes.
        BoardUnreachable: the simulator does not start.
    """
    from hil.controller.links import direct, sim

    where = address or config.connection.address
    if not where:
        return sim.start(config, faults)
    if faults:
        raise UsageError("--fault is for simulators only", hint="leave it out, or use --runtime-hw-type sim")
    for entry in entry_points(group="hil.links"):
        if where.startswith(f"{entry.name}:"):
            link: Link = entry.load()(where, config)
            return link
    return direct.connect(where, config)

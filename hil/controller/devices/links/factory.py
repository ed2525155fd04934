"""The kinds of links, and which of them a board is reached by.

A package adds a kind under the entry-point group ``hil.links``: an address's prefix, without the colon -> a function
``(address, config) -> Link``.
"""

from __future__ import annotations

from hil.controller.devices.links import agentless, direct, provider, sim, ssh
from hil.controller.devices.links.link import Link, LinkKind, LinkRequest, Say
from hil.controller.storage.packages import points
from hil.core.board_config import BoardConfig
from hil.errors import UsageError


def _of_package(address: str) -> bool:
    return any(address.startswith(f"{entry.name}:") for entry in points("hil.links"))


def _connect_by_package(request: LinkRequest) -> Link:
    entry = next(entry for entry in points("hil.links") if request.address.startswith(f"{entry.name}:"))
    link: Link = entry.load()(request.address, request.config)
    return link


# The first that a request is for opens it.
KINDS = (
    agentless.KIND,
    sim.KIND,
    provider.KIND,
    LinkKind("package", _connect_by_package, _of_package),
    ssh.KIND,
    direct.KIND,
)


def is_address(text: str) -> bool:
    """Whether a text is an address, and not a board's name or config file."""
    return any(kind.is_address(text) for kind in KINDS)


def open_link(
    address: str,
    config: BoardConfig,
    *,
    faults: tuple[str, ...] = (),
    runtime: str = "",
    purpose: str = "",
    wait_s: float = 60.0,
    say: Say = lambda text: None,
    without_agent: str = "",
) -> Link:
    """Open the link for an address, or start the simulator where the config says so.

    Args:
        address: what ``--board`` gave, or "" for the config's own.
        config: the board's config.
        faults: for a simulator: faults to switch on.
        runtime: the runtime that an agent must have which is put on the board now.
        purpose: of a board that is lent: told to others who wait for a board.
        wait_s: how long to wait while somebody else has the board.
        say: told what goes on where it takes long.
        without_agent: why the board is to be served by command; "" leaves it to the config.

    Raises:
        UsageError: the address is none that a link takes.
        BoardError: nobody answers there, it refuses us, or no agent can be put there.
    """
    where = address or config.connection.address
    request = LinkRequest(where, config, address or config.name, faults, runtime, purpose, wait_s, say, without_agent)
    kind = next((kind for kind in KINDS if kind.is_for(request)), None)
    if kind is None and not where:
        raise UsageError(
            f"{config.name} is a kind of board and has no address",
            hint=f"--board USER@HOST --runtime-hw-type {config.name}",
        )
    if faults and not (kind and kind.takes_faults):
        raise UsageError("--fault is for simulators only", hint="leave it out, or use --runtime-hw-type sim")
    # It says what is wrong with the address.
    return (kind or direct.KIND).connect(request)

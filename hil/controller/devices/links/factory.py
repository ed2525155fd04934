"""Opens the link that an address names.

A link is opened by what the user wrote after ``--board`` and gives a :class:`hil.controller.devices.client.Target`.
Kinds that come with hil are named below; a package adds one under the entry-point group ``hil.links``: prefix -> a
function ``(address, config) -> Link``.
"""

from __future__ import annotations

from hil.controller.devices.links import direct
from hil.controller.devices.links.link import Link, Say
from hil.controller.devices.links.provider import is_lent, provider_of
from hil.controller.devices.ssh.address import is_ssh_address
from hil.controller.storage.registry import points
from hil.core.boards import BoardConfig
from hil.errors import UsageError


def is_address(text: str) -> bool:
    """Whether a text is an address, and not a board's name or config file."""
    return (
        is_lent(text)
        or direct.is_address(text)
        or is_ssh_address(text)
        or any(text.startswith(f"{entry.name}:") for entry in points("hil.links"))
    )


def open_link(
    address: str,
    config: BoardConfig,
    *,
    faults: tuple[str, ...] = (),
    runtime: str = "",
    purpose: str = "",
    wait_s: float = 60.0,
    say: Say = lambda text: None,
) -> Link:
    """Open the link for an address, or start the simulator where the config says so.

    Args:
        address: what ``--board`` gave, or "" for the config's own.
        config: the board's config.
        faults: for a simulator: faults to switch on.
        runtime: the runtime that an agent must have which is put on the board now.
        purpose: of a board that is lent: told to others who wait for a board.
        wait_s: of a board that is lent: how long to wait for a board.
        say: told what goes on where it takes long.

    Raises:
        UsageError: the address is none that a link takes.
        BoardError: nobody answers there, it refuses us, or no agent can be put there.
    """
    where = address or config.connection.address
    if not where and config.is_simulator:
        from hil.controller.devices.links import sim

        return sim.start(config, faults, say)
    if not where:
        raise UsageError(
            f"{config.name} is a kind of board and has no address",
            hint=f"--board USER@HOST --runtime-hw-type {config.name}",
        )
    refuse_faults(faults)
    if is_lent(where):
        provider, selector = provider_of(where)
        return provider.connect(selector, runtime=runtime, purpose=purpose, wait_s=wait_s, say=say)
    for entry in points("hil.links"):
        if where.startswith(f"{entry.name}:"):
            link: Link = entry.load()(where, config)
            return link
    if is_ssh_address(where):
        from hil.controller.devices.links import ssh

        return ssh.connect(where, config, runtime=runtime, say=say)
    return direct.connect(where, config)


def refuse_faults(faults: tuple[str, ...]) -> None:
    """What is no simulator has no faults to switch on.

    Raises:
        UsageError: some were asked for.
    """
    if faults:
        raise UsageError("--fault is for simulators only", hint="leave it out, or use --runtime-hw-type sim")

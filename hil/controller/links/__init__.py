"""Links: how the controller gets to an agent.

A link is opened by what the user wrote after ``--board`` and gives a :class:`hil.controller.client.Target`. Kinds that
come with hil are below; a package adds one under the entry-point group ``hil.links``: prefix -> a function
``(address, config) -> Link``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hil.boards import BoardConfig
from hil.controller.client import Target
from hil.controller.registry import points
from hil.errors import UsageError

if TYPE_CHECKING:
    from hil.controller.ssh.shell import Shell

Say = Callable[[str], None]


@dataclass
class Link:
    """A way to an agent, as long as it is open.

    Attributes:
        target: where the agent is reached.
        close: ends what the link started.
        log: what the far side's process printed so far, for an error's detail.
        renew: mends the way after a break, where it can be, and gives the target anew.
        shell: commands on the board, where it is reached over SSH.
        pushed_bytes: what the link itself sent to the board, to put an agent there.
        build: the agent that the link put there or found, as Describe calls it; "" where any will do.
        config: the board's config, where only who is at the far end decides which board it is.
        over: why the board is ours no more, "" where nothing is known of that; asked when it failed.
    """

    target: Target
    close: Callable[[], None] = field(default=lambda: None)
    log: Callable[[], str] = field(default=lambda: "")
    renew: Callable[[], Target] | None = None
    shell: Shell | None = None
    pushed_bytes: int = 0
    build: str = ""
    config: BoardConfig | None = None
    over: Callable[[], str] = field(default=lambda: "")


def is_farm(address: str) -> bool:
    """Whether an address is a selector of a farm's boards: which one it comes to shows when it is opened."""
    return address.startswith("farm:")


def is_address(text: str) -> bool:
    """Whether a text is an address, and not a board's name or config file."""
    from hil.controller.links import direct
    from hil.controller.ssh.address import is_ssh_address

    return (
        is_farm(text)
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
        purpose: of a farm: told to others who wait for a board.
        wait_s: of a farm: how long to wait for a board.
        say: told what goes on where it takes long.

    Raises:
        UsageError: the address is none that a link takes.
        BoardError: nobody answers there, it refuses us, or no agent can be put there.
    """
    from hil.controller.links import direct, sim
    from hil.controller.ssh.address import is_ssh_address

    where = address or config.connection.address
    if not where and config.is_simulator:
        return sim.start(config, faults, say)
    if not where:
        raise UsageError(
            f"{config.name} is a kind of board and has no address",
            hint=f"--board USER@HOST --runtime-hw-type {config.name}",
        )
    refuse_faults(faults)
    if is_farm(where):
        from hil.controller.farm import link as farm

        return farm.connect(where, runtime=runtime, purpose=purpose, wait_s=wait_s, say=say)
    for entry in points("hil.links"):
        if where.startswith(f"{entry.name}:"):
            link: Link = entry.load()(where, config)
            return link
    if is_ssh_address(where):
        from hil.controller.links import ssh

        return ssh.connect(where, config, runtime=runtime, say=say)
    return direct.connect(where, config)


def refuse_faults(faults: tuple[str, ...]) -> None:
    """What is no simulator has no faults to switch on.

    Raises:
        UsageError: some were asked for.
    """
    if faults:
        raise UsageError("--fault is for simulators only", hint="leave it out, or use --runtime-hw-type sim")

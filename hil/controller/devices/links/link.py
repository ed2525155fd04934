"""A link: how the controller gets to an agent, as long as it is open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hil.controller.devices.client import Target
from hil.core.boards import BoardConfig

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell

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

"""What a link is: how the controller gets to a board, as long as it is open; and what a kind of link has to say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hil.controller.devices.board_client import BoardClient, Target
from hil.core.board_config import BoardConfig

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell

Say = Callable[[str], None]


@dataclass
class Link:
    """A way to a board, as long as it is open.

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
        connect: makes the client of a board without an agent, for errors of that name; None: an agent's, at the target.
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
    connect: Callable[[str], BoardClient] | None = None


@dataclass(frozen=True)
class LinkRequest:
    """What a link is opened for.

    Attributes:
        address: what ``--board`` gave, or else the config's own; "" where neither names one.
        config: the board's config.
        board: how errors call the board.
        faults: for a simulator: faults to switch on.
        runtime: the runtime that is going to be used; "" is the config's.
        purpose: of a board that is lent: told to others who wait for a board.
        wait_s: how long to wait while somebody else has the board.
        say: told what goes on where it takes long.
        without_agent: why the board is served by command; "" where its config does not ask for that.
    """

    address: str
    config: BoardConfig
    board: str
    faults: tuple[str, ...] = ()
    runtime: str = ""
    purpose: str = ""
    wait_s: float = 60.0
    say: Say = lambda text: None
    without_agent: str = ""


@dataclass(frozen=True)
class LinkKind:
    """A kind of link; :mod:`hil.controller.devices.links.factory` lists them.

    Attributes:
        name: for people.
        connect: opens a link. It imports what is heavy when it is called. It raises UsageError for an address or a
            config that is wrong, and BoardError where nobody answers, the board refuses us, or cannot be used.
        is_address: whether a text is an address of this kind, and not a board's name or config file.
        serves: whether a request is for this kind; None: its address tells.
        takes_faults: whether faults can be switched on.
    """

    name: str
    connect: Callable[[LinkRequest], Link]
    is_address: Callable[[str], bool] = lambda text: False
    serves: Callable[[LinkRequest], bool] | None = None
    takes_faults: bool = False

    def is_for(self, request: LinkRequest) -> bool:
        """Whether a request is for this kind."""
        return self.serves(request) if self.serves is not None else self.is_address(request.address)

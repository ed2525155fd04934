"""What a link is: how the controller gets to a board, as long as it is open; what kinds there may be; lent boards.

Who lends boards, such as a lab farm, registers a :class:`BoardProvider` under the entry-point group
``hil.board_providers``: the prefix of its addresses, without the colon. What follows the colon is a selector, which the
provider reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_client import BoardClient, Target
from hil.core.board_config import BoardConfig
from hil.core.text import TextSink

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell


@dataclass
class Link:
    """A way to a board, as long as it is open."""

    target: Target
    close: Callable[[], None] = field(default=lambda: None)
    # what the far side's process printed so far, for an error's detail.
    log: Callable[[], str] = field(default=lambda: "")
    renew: Callable[[], Target] | None = None  # mends the way after a break, where it can be, and gives the target anew
    shell: Shell | None = None
    pushed_bytes: int = 0  # what the link itself sent to the board, to put an agent there
    build: str = ""  # the agent that the link put there or found, as Describe calls it; "" where any will do
    config: BoardConfig | None = None  # the board's config, where only who is at the far end decides which board it is
    # why the board is ours no more, "" where nothing is known of that; asked when it failed.
    over: Callable[[], str] = field(default=lambda: "")
    # makes the client of a board without an agent, for errors of that name; None: an agent's, at the target.
    connect: Callable[[str], BoardClient] | None = None


@dataclass(frozen=True)
class LinkKind:
    """A kind of link; :mod:`hil.controller.devices.board_resolver` lists them."""

    name: str
    # opens a link. It imports what is heavy when it is called. It raises UsageError for an address or a config that is
    # wrong, and BoardError where nobody answers, the board refuses us, or cannot be used.
    connect: Callable[[BoardChoice], Link]
    # whether a text is an address of this kind, and not a board's name or config file.
    is_address: Callable[[str], bool] = lambda text: False
    serves: Callable[[BoardChoice], bool] | None = None  # whether this kind leads to a board; None: its address tells
    takes_faults: bool = False

    def is_for(self, choice: BoardChoice) -> bool:
        """Whether this kind leads to the board."""
        return self.serves(choice) if self.serves is not None else self.is_address(choice.target)


class BoardLoan(Protocol):
    """A board that is waited for, then lent, until it is given back."""

    @property
    def name(self) -> str:
        """The board's name, once there is one."""

    @property
    def config(self) -> BoardConfig:
        """The board's config, once there is one; its address leads to the agent."""

    def wait(self, seconds: float) -> bool:
        """Wait for a board, at most so long; whether there is one. FarmError where none will ever do."""

    def queue_text(self) -> str:
        """How many go first, in words; "" while that is not known."""

    def ended(self, seconds: float) -> str:
        """Why the loan ended, though nobody here gave it back; waits so long for that. "" where it goes on."""

    def close(self) -> None:
        """Give the board back, or leave the queue."""


class BoardProvider(Protocol):
    """Lends boards."""

    def connect(self, selector: str, *, runtime: str, purpose: str, wait_s: float, say: TextSink) -> Link:
        """The link to a board, which is given back when the link is closed; options are those of :class:`BoardChoice`.

        Raises:
            UsageError: no provider is known here, or the selector cannot be read.
            NoSuchBoard: no board will ever do.
            BoardBusy: none was free in time.
        """

    def order(self, selector: str, purpose: str) -> BoardLoan:
        """Wait in the queue for a board.

        Args:
            selector: what the board must be; "" is any.
            purpose: told to others who wait for a board.

        Raises:
            UsageError: no provider is known here, or the selector cannot be read.
            FarmUnreachable: nobody answers.
        """

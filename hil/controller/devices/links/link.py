"""Links to boards, link kinds, and the interface of board providers.

A board provider, such as a lab farm, registers a :class:`BoardProvider` under the entry-point group
``hil.board_providers``. The name of the entry point is the prefix of the provider's addresses, without the colon. The
provider parses the selector after the colon.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_client import AgentEndpoint, BoardClient
from hil.core.board_config import BoardConfig
from hil.core.text import TextSink

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell


@dataclass
class Link:
    """Open connection to a board."""

    target: AgentEndpoint
    close: Callable[[], None] = field(default=lambda: None)
    # Return the remote process's output so far, for error details.
    log: Callable[[], str] = field(default=lambda: "")
    renew: Callable[[], AgentEndpoint] | None = None  # reconnects and returns the new target; None if not supported
    shell: Shell | None = None
    pushed_bytes: int = 0  # bytes that the link sent to install an agent on the board
    build: str = ""  # build of the agent that the link installed or found, as in Describe; "" accepts any
    config: BoardConfig | None = None  # the board's config, if the provider selects the board
    # Return why the lease ended, or "" if unknown. Called after a failure.
    over: Callable[[], str] = field(default=lambda: "")
    # Return the client for a board without an agent. The argument is the board's name for errors. None: use the agent
    # at the target.
    connect: Callable[[str], BoardClient] | None = None


@dataclass(frozen=True)
class Capabilities:
    """Features and requirements of the boards of a link kind, known before connecting."""

    sessions: bool = True  # a client reserves the board; False: each run waits until the board is free
    clock: bool = True  # the board's clock can be pinged
    python: bool = True  # the board needs Python


@dataclass(frozen=True)
class LinkKind:
    """Kind of link. :mod:`hil.controller.devices.choosing.board_resolver` lists all kinds."""

    name: str
    # Open a link. Imports heavy modules on demand. Raises UsageError for an invalid address or config. Raises
    # BoardError if the board does not respond, refuses the connection, or cannot be used.
    connect: Callable[[BoardChoice], Link]
    # Return whether a text is an address of this kind rather than a board's name or config file.
    is_address: Callable[[str], bool] = lambda text: False
    serves: Callable[[BoardChoice], bool] | None = None  # whether this kind opens a board; None: decide by address
    takes_faults: bool = False
    capabilities: Capabilities = Capabilities()

    def is_for(self, choice: BoardChoice) -> bool:
        """Return whether this kind opens the board."""
        return self.serves(choice) if self.serves is not None else self.is_address(choice.target)


class BoardLoan(Protocol):
    """Request for a board. The request first waits in a queue. Then the client has the board until :meth:`close`."""

    @property
    def name(self) -> str:
        """Name of the lent board."""

    @property
    def config(self) -> BoardConfig:
        """Config of the lent board. The address leads to the agent."""

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for a board.

        Return whether a board is lent. Raises FarmError if no board can ever match.
        """

    def queue_text(self) -> str:
        """Return the position in the queue as text, or "" while the position is unknown."""

    def ended(self, seconds: float) -> str:
        """Return why the provider ended the loan, or "" if the loan has not ended.

        Waits up to ``seconds`` for the end.
        """

    def close(self) -> None:
        """Return the board, or leave the queue."""


class BoardProvider(Protocol):
    """Provider of boards."""

    def connect(self, selector: str, *, runtime: str, purpose: str, wait_s: float, say: TextSink) -> Link:
        """Return the link to a board. Closing the link returns the board. For the options see :class:`BoardChoice`.

        Raises:
            UsageError: No provider is configured, or the selector is invalid.
            NoSuchBoard: No board can ever match.
            BoardBusy: No board was free in time.
        """

    def order(self, selector: str, purpose: str) -> BoardLoan:
        """Join the queue for a board.

        Args:
            selector: Requirements for the board; "" means any board.
            purpose: Shown to other users who wait for a board.

        Raises:
            UsageError: No provider is configured, or the selector is invalid.
            FarmUnreachable: The provider does not respond.
        """

"""Boards that somebody lends: a lab farm, or whatever a package registers.

A provider is registered under the entry-point group ``hil.board_providers``: the prefix of its addresses, without the
colon -> a :class:`BoardProvider`. What follows the colon is a selector, which the provider reads.
"""

from __future__ import annotations

from typing import Protocol

from hil.controller.devices.links.link import Link, LinkKind, LinkRequest, Say
from hil.controller.storage.packages import points
from hil.core.board_config import BoardConfig
from hil.errors import UsageError

_GROUP = "hil.board_providers"


class BoardLoan(Protocol):
    """A board that is waited for, then lent, until it is given back."""

    @property
    def name(self) -> str:
        """The board's name, once there is one."""

    @property
    def config(self) -> BoardConfig:
        """The board's config, once there is one; its address leads to the agent."""

    def wait(self, seconds: float) -> bool:
        """Wait for a board, at most so long; whether there is one. The place in the queue stays.

        Raises:
            FarmError: no board will ever do.
        """

    def queue_text(self) -> str:
        """How many go first, in words; "" while that is not known."""

    def ended(self, seconds: float) -> str:
        """Why the loan ended, though nobody here gave it back; waits so long for that. "" where it goes on."""

    def close(self) -> None:
        """Give the board back, or leave the queue."""


class BoardProvider(Protocol):
    """Lends boards."""

    def connect(self, selector: str, *, runtime: str, purpose: str, wait_s: float, say: Say) -> Link:
        """The link to a board, which is given back when the link is closed.

        Args:
            selector: what the board must be; "" is any.
            runtime: the one that is going to be used; "" is the board's own.
            purpose: told to others who wait for a board.
            wait_s: how long to wait for one.
            say: told what goes on while waiting.

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


def is_lent(address: str) -> bool:
    """Whether an address is a selector of boards that somebody lends: which one it comes to shows when it is opened."""
    prefix, colon, _ = address.partition(":")
    return bool(colon) and any(point.name == prefix for point in points(_GROUP))


def provider_of(address: str) -> tuple[BoardProvider, str]:
    """Who lends the boards of an address, and the selector in it.

    Raises:
        UsageError: nobody does, or what is registered cannot be loaded.
    """
    prefix, _, selector = address.partition(":")
    for point in points(_GROUP):
        if point.name == prefix:
            try:
                provider: BoardProvider = point.load()()
            except ImportError as error:
                raise UsageError(f"who lends the boards of {prefix}: cannot be loaded: {error}") from error
            return provider, selector.strip()
    raise UsageError(f"nobody lends boards of {address}")


def _connect(request: LinkRequest) -> Link:
    provider, selector = provider_of(request.address)
    return provider.connect(
        selector, runtime=request.runtime, purpose=request.purpose, wait_s=request.wait_s, say=request.say
    )


KIND = LinkKind("lent board", _connect, is_lent)

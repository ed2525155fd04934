"""``--board farm:SELECTOR``: a board that the farm lends for as long as the link is open."""

from __future__ import annotations

from hil.controller.client import Target
from hil.controller.farm.holding import Holding
from hil.controller.farm.leased import lease_order
from hil.controller.farm.places import farm_address
from hil.controller.links import Link, Say
from hil.errors import NoSuchBoard, SessionEnded

PREFIX = "farm:"
# So long after an error of the board the farm's reason for it may come.
_REASON_S = 5.0


def selector_of(address: str) -> str:
    """The selector of an address; ``farm:`` alone is any board."""
    return address.removeprefix(PREFIX).strip()


def connect(address: str, *, runtime: str, purpose: str, wait_s: float, say: Say) -> Link:
    """The link to a board of the farm, which it is given back to when the link is closed.

    Args:
        address: ``farm:SELECTOR``.
        runtime: the one that is going to be used; "" is the board's own.
        purpose: told to others who wait for a board.
        wait_s: how long to wait for one.
        say: told what goes on while waiting.

    Raises:
        UsageError: no farm is known here, or the selector cannot be read.
        NoSuchBoard: no board of the farm will ever do.
        BoardBusy: none was free in time.
    """
    holding = Holding(farm_address(), lease_order(selector_of(address), purpose))
    try:
        holding.wait_told(wait_s, say)
        config = holding.config
        if runtime and config.devices and runtime not in config.devices:
            raise NoSuchBoard(
                f"it has no runtime {runtime!r}",
                board=config.name,
                hint=f"its runtimes: {', '.join(config.devices)}; a narrower selector picks another board",
            )

        def renew() -> Target:
            if why := holding.ended(_REASON_S):
                raise SessionEnded(f"the lease ended: {why}", board=config.name)
            return Target(holding.address)

        return Link(
            Target(holding.address),
            holding.close,
            holding.log,
            renew,
            config=config,
            over=lambda: holding.ended(_REASON_S),
        )
    except BaseException:
        holding.close()
        raise

"""The farm lends boards: ``--board farm:SELECTOR``."""

from __future__ import annotations

from hil.controller.devices.client import Target
from hil.controller.devices.links.link import Link, Say
from hil.controller.farm.holding import Holding
from hil.controller.farm.leased import lease_order
from hil.controller.farm.places import farm_address
from hil.errors import NoSuchBoard, SessionEnded

# So long after an error of the board the farm's reason for it may come.
_REASON_S = 5.0


class FarmProvider:
    """The lab farm as a provider of boards (:class:`hil.controller.devices.links.provider.BoardProvider`)."""

    def connect(self, selector: str, *, runtime: str, purpose: str, wait_s: float, say: Say) -> Link:
        """The link to a board of the farm, which it is given back to when the link is closed."""
        return _connect(self.order(selector, purpose), runtime, wait_s, say)

    def order(self, selector: str, purpose: str) -> Holding:
        """Queue for a board of the farm."""
        return Holding(farm_address(), lease_order(selector, purpose))


def _connect(holding: Holding, runtime: str, wait_s: float, say: Say) -> Link:
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

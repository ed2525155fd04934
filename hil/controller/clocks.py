"""What was seen of a board's clock in a session."""

from __future__ import annotations

from collections.abc import Sequence

from hil import clock

# A clock runs evenly for some minutes, not for hours.
_EVEN_NS = 600_000_000_000
_MOST = 64


class BoardClock:
    """The pings of a session's last minutes, as many as a fit needs."""

    def __init__(self) -> None:
        self._pings: list[clock.Ping] = []
        self._fit: clock.ClockFit | None = None

    def add(self, pings: Sequence[clock.Ping]) -> None:
        """More pings, taken after all others."""
        kept = [ping for ping in self._pings if pings[-1].received_ns - ping.sent_ns < _EVEN_NS]
        if len(kept) > _MOST:
            # The quicker one of two neighbours tells more.
            kept = [min(pair, key=lambda ping: ping.round_trip_ns) for pair in zip(kept[::2], kept[1::2], strict=False)]
        self._pings, self._fit = [*kept, *pings], None

    def age_ns(self) -> float:
        """How long ago the last ping was; infinite where there was none."""
        return clock.now_ns() - self._pings[-1].received_ns if self._pings else float("inf")

    def fit(self) -> clock.ClockFit:
        """The line through all of them; made once until more come.

        Raises:
            ValueError: there were none.
        """
        self._fit = self._fit or clock.fit(self._pings)
        return self._fit

"""What was seen of a board's clock in a session."""

from __future__ import annotations

from collections.abc import Sequence

from hil.core import clock

# A clock runs evenly for some minutes, not for hours.
_EVEN_NS = 600_000_000_000
_MOST = 64


class BoardClock:
    """A session's pings, as many as fits need."""

    def __init__(self) -> None:
        self._pings: list[clock.Ping] = []

    def add(self, pings: Sequence[clock.Ping]) -> None:
        """More pings, taken after all others."""
        kept = self._pings
        if len(kept) > _MOST:
            # The quicker one of two neighbours tells more.
            kept = [min(pair, key=lambda ping: ping.round_trip_ns) for pair in zip(kept[::2], kept[1::2], strict=False)]
        self._pings = [*kept, *pings]

    def age_ns(self) -> float:
        """How long ago the last ping was; infinite where there was none."""
        return clock.now_ns() - self._pings[-1].received_ns if self._pings else float("inf")

    def fit(self, since_ns: int, until_ns: int) -> clock.ClockFit:
        """The line through the pings of that time on the host's clock, of the minutes before it, and one from before it
        in any case, where there is one.

        Raises:
            ValueError: there were none.
        """
        before = max((ping.sent_ns for ping in self._pings if ping.sent_ns <= since_ns), default=since_ns)
        first = min(before, until_ns - _EVEN_NS)
        return clock.fit([ping for ping in self._pings if ping.sent_ns >= first], until_ns)

"""Two clocks and how one is read from the other.

A board stamps events with its own monotonic clock. The controller pings it, and from the ping with the least round
trip knows the offset to within half that round trip (Cristian, "Probabilistic clock synchronization", 1989).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass


def now_ns() -> int:
    """This machine's monotonic clock in nanoseconds: the clock of every stamp that hil takes."""
    return time.monotonic_ns()


@dataclass(frozen=True)
class Ping:
    """One exchange: sent and received on the host's clock, stamped on the board's, all in nanoseconds."""

    sent_ns: int
    board_ns: int
    received_ns: int

    @property
    def round_trip_ns(self) -> int:
        """How long the exchange took on the host's clock."""
        return self.received_ns - self.sent_ns


@dataclass(frozen=True)
class ClockFit:
    """``board_ns = host_ns + offset_ns + drift * (host_ns - at_host_ns)``, true to within ``error_ns`` at the pings."""

    offset_ns: int
    drift: float
    at_host_ns: int
    error_ns: int

    def to_host(self, board_ns: int) -> int:
        """The host's time for a stamp of the board's."""
        elapsed = board_ns - self.offset_ns - self.at_host_ns
        return self.at_host_ns + round(elapsed / (1.0 + self.drift))


def fit(before: Sequence[Ping], after: Sequence[Ping] = ()) -> ClockFit:
    """Fit offset and drift from pings taken before and (for the drift) after a run.

    Args:
        before: at least one ping.
        after: pings taken later; without them the drift is 0.

    Raises:
        ValueError: no ping was given.
    """
    first = min(before, key=lambda ping: ping.round_trip_ns)
    at, offset, error = _point(first)
    if not after:
        return ClockFit(offset, 0.0, at, error)
    last = min(after, key=lambda ping: ping.round_trip_ns)
    last_at, last_offset, last_error = _point(last)
    drift = (last_offset - offset) / (last_at - at) if last_at > at else 0.0
    return ClockFit(offset, drift, at, max(error, last_error))


def _point(ping: Ping) -> tuple[int, int, int]:
    middle = (ping.sent_ns + ping.received_ns) // 2
    return middle, ping.board_ns - middle, (ping.round_trip_ns + 1) // 2

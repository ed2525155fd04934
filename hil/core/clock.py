"""Synchronize a board's monotonic clock with the host's.

A board stamps events with its monotonic clock, and the controller pings the board. The board takes the stamp of a ping
between sending and receiving on the host (Cristian, "Probabilistic clock synchronization", 1989). For a steady clock,
the offset is a linear function of host time. Each ping gives an upper and a lower limit of this line. hil uses the
middle of the possible lines, which has a known maximum error.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

# File of a profile that pairs the profiler's clock with the board's clock.
CLOCK_FILE = "clock.json"
# Maximum drift between two clocks: 0.1 %.
MAX_DRIFT = 1e-3
# Stamps are truncated to whole nanoseconds.
_WHOLE_NS = 1.0

_read: Callable[[], int] = time.monotonic_ns


def get_time_ns() -> int:
    """Return this machine's monotonic time in nanoseconds. All of hil's stamps use this clock."""
    return _read()


def replace_clock(read: Callable[[], int]) -> None:
    """Replace this process's clock, for a simulated board."""
    global _read
    _read = read


@dataclass(frozen=True)
class Ping:
    """Ping exchange: host times for send and receive, and the board's stamp, in nanoseconds."""

    sent_ns: int
    board_ns: int
    received_ns: int

    @property
    def round_trip_ns(self) -> int:
        """Round-trip time on the host's clock."""
        return self.received_ns - self.sent_ns


@dataclass(frozen=True)
class ClockFit:
    """Linear fit: ``board_ns = host_ns + offset_ns + drift * (host_ns - at_host_ns)``."""

    offset_ns: int  # lead of the board's clock at ``at_host_ns``
    drift: float
    at_host_ns: int
    # Maximum stamp error between the first ping and the last ping (or ``until_ns``), assuming a steady clock.
    error_ns: int
    # 0 if a single steady clock explains all pings. Otherwise the largest jump between two pings (negative for a
    # backward jump). The other fields then apply to the time after the jump.
    jumped_ns: int = 0

    def to_host(self, board_ns: int) -> int:
        """Convert a board stamp to host time."""
        elapsed = board_ns - self.offset_ns - self.at_host_ns
        return self.at_host_ns + round(elapsed / (1.0 + self.drift))

    def to_board(self, host_ns: int) -> int:
        """Convert host time to a board stamp."""
        return host_ns + self.offset_ns + round(self.drift * (host_ns - self.at_host_ns))


def fit(pings: Sequence[Ping], until_ns: int = 0) -> ClockFit:
    """Fit a line to pings from before, during and after the interval to convert.

    Args:
        until_ns: host time up to which the error must apply, if later than the last ping. The error grows with
            time because the drift is uncertain.

    Raises:
        ValueError: ``pings`` is empty.
    """
    middle, near, lines = _fit_between(tuple(pings))
    start = min(ping.sent_ns for ping in pings) - middle
    end = max(until_ns, *(ping.received_ns for ping in pings)) - middle
    if not lines:
        steps = [_step(*pair) for pair in itertools.pairwise(pings)]
        jumped = max(steps, key=abs)
        since = fit(pings[steps.index(jumped) + 1 :], until_ns)
        return replace(since, jumped_ns=max(jumped, since.jumped_ns, key=abs))
    at_ends = [[offset + drift * at for offset, drift in lines] for at in (start, end)]
    (low, high), (last_low, last_high) = ((min(ends), max(ends)) for ends in at_ends)
    drift = ((last_low + last_high) - (low + high)) / 2 / max(end - start, 1)
    offset = (low + high) / 2 - drift * start
    error = max(high - low, last_high - last_low) / 2
    # Convert from board to host nanoseconds, which are shorter if the board's clock runs slow.
    error /= min(1.0, 1.0 + drift)
    # Add 2 ns, because the fields and the stamps are rounded to whole nanoseconds.
    return ClockFit(near + round(offset), drift, middle, int(error) + 2)


@functools.lru_cache(maxsize=8)  # consecutive runs within a second have the same pings
def _fit_between(pings: tuple[Ping, ...]) -> tuple[int, int, list[tuple[float, float]]]:
    """Return a host time, the approximate lead of the board's clock at that time, and all lines relative to both."""
    best = min(pings, key=lambda ping: ping.round_trip_ns)
    middle = (best.sent_ns + best.received_ns) // 2
    near = best.board_ns - middle
    # Relative to these two values, all numbers are small enough for exact floats.
    limits = [
        (float(host - middle), float(ping.board_ns - host - near), side)
        for ping in pings
        for host, side in ((ping.sent_ns, 1.0), (ping.received_ns, -1.0))
    ]
    return middle, near, _find_lines(limits)


def _find_lines(limits: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """Return the corners (offset, drift) of the set of lines that satisfy all limits.

    Return [] if there is no such line.

    Args:
        limits: (host time, board offset, side): the line passes below this point (side 1) or above it (side -1).
    """
    widest = max(abs(value) + MAX_DRIFT * abs(at) for at, value, _ in limits) + 1
    corners = [(-widest, -MAX_DRIFT), (widest, -MAX_DRIFT), (widest, MAX_DRIFT), (-widest, MAX_DRIFT)]
    for at, value, side in limits:
        room = [side * (value - offset - drift * at) + _WHOLE_NS for offset, drift in corners]
        if min(room) >= 0:
            continue
        kept: list[tuple[float, float]] = []
        for number, (corner, inside) in enumerate(zip(corners, room, strict=True)):
            before, was_inside = corners[number - 1], room[number - 1]
            if (inside >= 0) != (was_inside >= 0):
                share = was_inside / (was_inside - inside)
                kept.append((before[0] + share * (corner[0] - before[0]), before[1] + share * (corner[1] - before[1])))
            if inside >= 0:
                kept.append(corner)
        corners = kept
        if not corners:
            break
    return corners


def _step(before: Ping, after: Ping) -> int:
    """Return the clock's forward jump between two pings."""
    earlier, later = (2 * ping.board_ns - ping.sent_ns - ping.received_ns for ping in (before, after))
    return (later - earlier) // 2


def convert_by_pairs(time_ns: int, pairs: Sequence[tuple[int, int]]) -> int:
    """Convert a time to another clock, along the line through the first and last pair of readings.

    Args:
        pairs: (time, other clock's time), in order. Equal rates are assumed if there is only one pair, or if a clock
            stopped or was set back. Without pairs, the clocks are assumed to be equal.
    """
    if not pairs:
        return time_ns
    (first, other_first), (last, other_last) = pairs[0], pairs[-1]
    elapsed = time_ns - first
    if last <= first or other_last <= other_first:
        return other_first + elapsed
    # Integer arithmetic: float64 loses nanoseconds on a clock with months of uptime.
    return other_first + elapsed * (other_last - other_first) // (last - first)

"""Two clocks and how one is read from the other.

A board stamps events with its own monotonic clock. The controller pings it: each ping's stamp was taken between sending
and receiving (Cristian, "Probabilistic clock synchronization", 1989), so a steady clock's offset, as a line over the
host's time, has to pass between all of them. Of the lines that do, the middle one is taken, and how far it can be off
is known.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

# Of the files that a profile pass gives: the one that pairs its profiler's clock with the board's.
CLOCK_FILE = "clock.json"
# No computer's clock runs so much faster or slower than another: 0.1 %.
DRIFT_MOST = 1e-3
# Stamps are cut off to whole nanoseconds.
_WHOLE_NS = 1.0

_read: Callable[[], int] = time.monotonic_ns


def now_ns() -> int:
    """This machine's monotonic clock in nanoseconds: the clock of every stamp that hil takes."""
    return _read()


def replace_clock(read: Callable[[], int]) -> None:
    """Let this process stamp with another clock from now on: a simulated board's."""
    global _read
    _read = read


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
    """``board_ns = host_ns + offset_ns + drift * (host_ns - at_host_ns)``."""

    offset_ns: int  # how far the board's clock is ahead at ``at_host_ns``
    drift: float
    at_host_ns: int
    # no stamp from the first ping to the last, or to the time that was asked for, is further off than this, if the
    # clock ran evenly.
    error_ns: int
    # 0 where one steady clock explains all pings; else by how much it was put forward between two of them, and all else
    # here holds for the time since.
    jumped_ns: int = 0

    def to_host(self, board_ns: int) -> int:
        """The host's time for a stamp of the board's."""
        elapsed = board_ns - self.offset_ns - self.at_host_ns
        return self.at_host_ns + round(elapsed / (1.0 + self.drift))


def fit(pings: Sequence[Ping], until_ns: int = 0) -> ClockFit:
    """The line that fits pings taken before, during and after what is to be told in the host's time.

    Args:
        until_ns: host time up to which the error is to hold, if that is after the last ping: the drift is not known
            exactly, so it grows.

    Raises:
        ValueError: no ping was given.
    """
    middle, near, lines = _between(tuple(pings))
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
    # In nanoseconds of the board's; where that one runs slower, they are longer ones of the host's.
    error /= min(1.0, 1.0 + drift)
    # The fields are whole nanoseconds, and the clocks tell no less.
    return ClockFit(near + round(offset), drift, middle, int(error) + 2)


@functools.lru_cache(maxsize=8)  # runs that follow each other within a second are told by the same pings
def _between(pings: tuple[Ping, ...]) -> tuple[int, int, list[tuple[float, float]]]:
    """A host time, how far the board's clock is ahead then, about, and from there the lines between all pings."""
    best = min(pings, key=lambda ping: ping.round_trip_ns)
    middle = (best.sent_ns + best.received_ns) // 2
    near = best.board_ns - middle
    # All that follows is small beside these two: floats are exact enough for it.
    limits = [
        (float(host - middle), float(ping.board_ns - host - near), side)
        for ping in pings
        for host, side in ((ping.sent_ns, 1.0), (ping.received_ns, -1.0))
    ]
    return middle, near, _lines(limits)


def _lines(limits: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """The corners (offset, drift) of all lines that stay within limits; none where no line does.

    Args:
        limits: (host time, board's offset, side): the line passes below it (side 1) or above it (side -1).
    """
    widest = max(abs(value) + DRIFT_MOST * abs(at) for at, value, _ in limits) + 1
    corners = [(-widest, -DRIFT_MOST), (widest, -DRIFT_MOST), (widest, DRIFT_MOST), (-widest, DRIFT_MOST)]
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
    """By how much the clock was put forward between two pings."""
    earlier, later = (2 * ping.board_ns - ping.sent_ns - ping.received_ns for ping in (before, after))
    return (later - earlier) // 2


def by_pairs(time_ns: int, pairs: Sequence[tuple[int, int]]) -> int:
    """Convert a time to another clock by the line through the first and the last pair of readings.

    Args:
        pairs: (time, the other clock's time), in order. Both clocks are taken to run alike if there is one pair, or if
            one of them stood still or was set back; without pairs they are the same clock.
    """
    if not pairs:
        return time_ns
    (first, other_first), (last, other_last) = pairs[0], pairs[-1]
    elapsed = time_ns - first
    if last <= first or other_last <= other_first:
        return other_first + elapsed
    # In integers: a float64 of a clock that has run for months is off by some nanoseconds.
    return other_first + elapsed * (other_last - other_first) // (last - first)

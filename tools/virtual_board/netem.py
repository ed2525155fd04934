"""Add delay, jitter, loss and a rate limit to a virtual board's network: two TAP devices with a queue between them.

The syntax is the syntax of ``tc netem``, which most kernels in containers lack.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import re
import select
import struct
import time
from dataclasses import dataclass, field

from hil.errors import UsageError

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAME = 65536
# Queue length, equal to netem's default.
_LIMIT = 1000
_TIME = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_RATE = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SPEC = re.compile(
    r"(?:delay\s+(?P<delay>[\d.]+)(?P<delay_unit>us|ms|s)(?:\s+(?P<jitter>[\d.]+)(?P<jitter_unit>us|ms|s))?\s*)?"
    r"(?:loss\s+(?P<loss>[\d.]+)%\s*)?"
    r"(?:rate\s+(?P<rate>[\d.]+)(?P<rate_unit>[kmg]?bit))?"
)


@dataclass(frozen=True)
class Netem:
    """Effects on all packets, in both directions."""

    delay_s: float = 0.0  # delay in seconds
    jitter_s: float = 0.0  # maximum delay deviation in seconds; packets stay in order
    loss: float = 0.0  # packet loss, from 0 to 1
    rate_bps: float = 0.0  # bits per second, or 0 for no limit


def parse(words: str) -> Netem:
    """Parse ``[delay TIME [JITTER]] [loss PERCENT] [rate RATE]``, such as "delay 20ms 5ms loss 1% rate 10mbit".

    Raises:
        UsageError: the text is invalid.
    """
    found = _SPEC.fullmatch(words.strip())
    try:
        if found is None:
            raise ValueError
        said = {key: value or "" for key, value in found.groupdict().items()}
        netem = Netem(
            float(said["delay"] or 0) * _TIME.get(said["delay_unit"], 0),
            float(said["jitter"] or 0) * _TIME.get(said["jitter_unit"], 0),
            float(said["loss"] or 0) / 100,
            float(said["rate"] or 0) * _RATE.get(said["rate_unit"], 0),
        )
    except ValueError:
        netem = None
    if netem is None or netem.loss > 1 or netem.jitter_s > netem.delay_s:
        raise UsageError(
            f"invalid network quality {words!r}",
            hint='expected parts of "delay 20ms 5ms loss 1% rate 10mbit" in this order; '
            "the jitter must be at most the delay, and the loss at most 100%",
        )
    return netem


def open_tap(name: str) -> int:
    """Create a TAP device. The device exists until the returned descriptor is closed.

    Raises:
        OSError: this machine has no TAP devices.
    """
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


@dataclass
class Way:
    """One direction of the network: computes arrival times and preserves the order of frames."""

    netem: Netem
    to: int
    held: int = 0
    free_at: float = 0.0
    last: float = 0.0
    random: random.Random = field(default_factory=random.Random)

    def schedule_frame(self, size: int, now: float) -> float | None:
        """Return the arrival time of a frame that is sent now, or None if the frame is lost."""
        netem = self.netem
        if self.random.random() < netem.loss or self.held >= _LIMIT:
            return None
        if netem.rate_bps:
            self.free_at = max(now, self.free_at) + size * 8 / netem.rate_bps
        late = netem.delay_s + self.random.uniform(-netem.jitter_s, netem.jitter_s)
        self.last = max(self.last, max(now, self.free_at) + late)
        return self.last


def forward(one: int, other: int, netem: Netem) -> None:
    """Forward frames between two TAP devices in both directions, forever."""
    ways = {one: Way(netem, other), other: Way(netem, one)}
    queue: list[tuple[float, int, Way, bytes]] = []
    numbers = itertools.count()
    while True:
        wait = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        readable, _, _ = select.select(list(ways), [], [], wait)
        now = time.monotonic()
        for tap in readable:
            way = ways[tap]
            frame = os.read(tap, _FRAME)
            due = way.schedule_frame(len(frame), now)
            if due is not None:
                way.held += 1
                heapq.heappush(queue, (due, next(numbers), way, frame))
        while queue and queue[0][0] <= now:
            _, _, way, frame = heapq.heappop(queue)
            way.held -= 1
            try:
                os.write(way.to, frame)
            except OSError:
                # The other side is full or down, so the packet is lost.
                continue

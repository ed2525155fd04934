"""Convert times of a board's host to the monotonic clock of this machine."""

from __future__ import annotations

import threading

from hil.core import clock

# Clocks of two machines may drift apart by this fraction: 100 ppm.
_DRIFT = 1e-4


class HostClock:
    """Clock of a farm host, known from the messages that arrive. Thread-safe.

    A message arrives after it was sent, and the fastest message is late by the network's delay. So the smallest
    difference between arrival and sending is the offset of the clocks, with an error of this delay.
    """

    def __init__(self) -> None:
        self.is_known = threading.Event()
        self._mutex = threading.Lock()
        self._offset_ns: float | None = None
        self._at_ns = 0
        self._is_same_machine = False

    def start(self, sent_ns: int, *, is_same_machine: bool = False) -> None:
        """Handle a message that the host sent at ``sent_ns`` on its clock. The same machine has the same clock."""
        self._is_same_machine = is_same_machine
        self._add_message(sent_ns, clock.get_time_ns())
        self.is_known.set()

    def convert(self, host_ns: int) -> int:
        """Convert the time of a line that arrives now. The result is not later than now."""
        if self._is_same_machine:
            return host_ns
        now_ns = clock.get_time_ns()
        return min(host_ns + round(self._add_message(host_ns, now_ns)), now_ns)

    def _add_message(self, sent_ns: int, now_ns: int) -> float:
        """Return the offset of the clocks after a message."""
        with self._mutex:
            found = float(now_ns - sent_ns)
            if self._offset_ns is not None:
                found = min(found, self._offset_ns + (now_ns - self._at_ns) * _DRIFT)
            self._offset_ns, self._at_ns = found, now_ns
            return found

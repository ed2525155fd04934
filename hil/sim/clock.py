"""A simulated board's clock: this machine's, but off, too fast, or put forward in the middle of a run.

The agent and its workers read the same: what changes lies in a small file that all of them map.
"""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

from hil.core import clock
from hil.sim.faults import Fault

_FILE = "clock"
# When the clock started, and by how much it was put forward since, in nanoseconds.
_STATE = struct.Struct("=qq")
_STARTED, _AHEAD = range(2)


class SimClock:
    """The clock of a board with the fault ``clock``.

    Args:
        fault: what is wrong with it.
        folder: the simulator's; :meth:`start` makes the file there.
    """

    def __init__(self, fault: Fault, folder: Path) -> None:
        self._offset_ns: int = round(fault.keys["offset"] * 1e9)
        self._rate: float = fault.keys["ppm"] * 1e-6
        self._jump_ns: int = round(fault.keys["jump"] * 1e9)
        with (folder / _FILE).open("r+b") as file:
            # As whole numbers, each written at once: others read them meanwhile.
            self._shared = memoryview(mmap.mmap(file.fileno(), _STATE.size)).cast("q")
        self._started_ns: int = self._shared[_STARTED]

    @staticmethod
    def start(folder: Path) -> None:
        """Start the clock, before anybody reads it."""
        (folder / _FILE).write_bytes(_STATE.pack(time.monotonic_ns(), 0))

    def install(self) -> None:
        """Have this process stamp with it."""
        clock.replace_clock(self.now_ns)

    def now_ns(self) -> int:
        """What it shows."""
        now = time.monotonic_ns()
        gained = int((now - self._started_ns) * self._rate)
        return now + self._offset_ns + self._shared[_AHEAD] + gained

    def jump(self) -> None:
        """Put it forward, once and for all that read it."""
        self._shared[_AHEAD] = self._jump_ns

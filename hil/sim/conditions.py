"""Simulate the conditions of a device: the faults ``throttle``, ``noise`` and ``load``.

With the ``throttle`` fault, the first run heats the device. Temperature and frequency depend only on the time since
this run, so that the workers and the agent use the same values without communication.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path

from hil.protocol.v1 import agent_pb2 as pb
from hil.sim.faults import Fault

_FREQUENCY_MHZ = 1800.0
# Temperatures in degrees Celsius: idle, just before throttling, throttled.
_IDLE, _HOT, _THROTTLED = 45.0, 75.0, 85.0
_COOLING_SECONDS = 1.0  # time constant of the cooling after throttling
_LOADED_SHARE = 0.5  # share of the runs, chosen at random, that the ``load`` fault slows down
_BUSY = re.compile(r"cpu(\d+) busy")
_FIRST_RUN = "throttle.first-run"


class SimConditions:
    """Conditions of a simulated device.

    Args:
        faults: faults of the board. Faults that do not change the conditions are ignored.
        folder: directory that the board's workers and agent share.
    """

    def __init__(self, faults: Sequence[Fault], folder: Path) -> None:
        by_name = {fault.name: fault.keys for fault in faults}
        self._throttle = by_name.get("throttle")
        self._noise = by_name.get("noise")
        self._load = by_name.get("load")
        self._mark = folder / _FIRST_RUN
        self._started = math.inf  # time of the first run; infinity if unknown
        self._noise_of = random.Random(self._noise["seed"] if self._noise else 0)
        self._load_of = random.Random(self._load["seed"] if self._load else 0)

    @property
    def are_simulated(self) -> bool:
        """True if a fault changes the readings of the board."""
        return self._throttle is not None or self._load is not None

    def compute_next_factor(self) -> float:
        """Return the factor by which the next run takes longer. Workers call this once per run."""
        factor = 1.0
        if self._throttle is not None:
            if self._started == math.inf:
                with contextlib.suppress(FileExistsError):
                    self._mark.touch(exist_ok=False)
            factor *= self._throttle["factor"] if self._is_throttled(self._find_elapsed()) else 1.0
        if self._noise is not None:
            # Disturbances only make runs longer.
            factor *= 1 + abs(self._noise_of.gauss(0, self._noise["share"]))
        if self._load is not None and self._load_of.random() < _LOADED_SHARE:
            factor *= self._load["factor"]
        return factor

    def change_readings(self, readings: list[pb.Reading]) -> list[pb.Reading]:
        """Return the machine's readings or counters with the values of the simulated device."""
        found = {one.name: one for one in readings}
        if self._throttle is not None:
            elapsed = self._find_elapsed()
            clock = _FREQUENCY_MHZ / (self._throttle["factor"] if self._is_throttled(elapsed) else 1.0)
            values = (
                ("cpu0 frequency", clock, "MHz"),
                ("cpu0 highest frequency", clock, "MHz"),
                ("thermal_zone0 (simulated)", self._find_temperature(elapsed), "degC"),
                ("throttle events", float(elapsed >= self._throttle["after"]), ""),
            )
            found |= {name: pb.Reading(name=name, value=value, unit=unit) for name, value, unit in values}
        if self._load is not None:
            for name, one in found.items():
                if match := _BUSY.fullmatch(name):
                    share = min(max(self._load["cores"] - int(match[1]), 0.0), 1.0)
                    one.value = min(one.value + 100 * share, 100.0)
        return list(found.values())

    def _find_elapsed(self) -> float:
        """Return the seconds since the first run, or minus infinity before it."""
        if self._started == math.inf:
            with contextlib.suppress(FileNotFoundError):
                self._started = self._mark.stat().st_mtime
        return time.time() - self._started

    def _is_throttled(self, elapsed: float) -> bool:
        assert self._throttle is not None
        after, lasts = float(self._throttle["after"]), float(self._throttle["lasts"])
        return 0 <= elapsed - after < (lasts or math.inf)

    def _find_temperature(self, elapsed: float) -> float:
        assert self._throttle is not None
        after, lasts = float(self._throttle["after"]), float(self._throttle["lasts"]) or math.inf
        if elapsed < after:
            return _IDLE + (_HOT - _IDLE) * max(elapsed, 0.0) / after
        cooled = max(elapsed - after - lasts, 0.0)
        return _IDLE + (_THROTTLED - _IDLE) * math.exp(-cooled / _COOLING_SECONDS)

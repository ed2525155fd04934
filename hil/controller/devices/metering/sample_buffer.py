"""Collect samples from a thread, and convert their times to this machine's clock."""

from __future__ import annotations

import threading
import time
from array import array

import numpy as np

from hil.controller.devices.metering.samples import MAX_SAMPLES, Floats, Nanoseconds, PowerSamples
from hil.core.clock import MAX_DRIFT, get_time_ns
from hil.core.meter_config import METER_CLOCKS

# Largest time of a sample after its arrival, and smallest delay of its arrival, on a clock of this machine.
_MAX_FUTURE_NS, _MAX_DELAY_NS = 10_000_000, 1_000_000_000
# Largest shift of a meter's clock, relative to this machine's clock, that drift and late arrival do not explain.
_MAX_SHIFT_NS = 50_000_000
# Parts of the measurement, in each of which a sample arrives almost without delay.
_ALIGNED_PARTS = 8
_EPOCH, _MONOTONIC = METER_CLOCKS[2], METER_CLOCKS[1]


class SampleBuffer:
    """Samples of a meter. One thread appends, other threads read.

    Args:
        clock: clock of the samples' times, a value of ``METER_CLOCKS``.
    """

    def __init__(self, clock: str) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._times_s = array("d")
        self._arrived_ns = array("q")
        self._watts = array("d")
        self._gpio = array("b")
        self.lost = self.invalid = 0

    def count_invalid(self) -> None:
        """Count a sample without a valid number."""
        self.invalid += 1

    def append(self, time_s: float | None, arrived_ns: int, watts: float, gpio: float | None) -> None:
        """Add a sample. Without a time of the meter, the arrival is its time."""
        with self._lock:
            if len(self._watts) >= MAX_SAMPLES:
                self.lost += 1
                return
            self._times_s.append(arrived_ns / 1e9 if time_s is None else time_s)
            self._arrived_ns.append(arrived_ns)
            self._watts.append(watts)
            if gpio is not None:
                self._gpio.append(gpio >= 0.5)

    def read(self, *, has_time: bool, problem: str) -> PowerSamples:
        """Return the samples in time order, without samples whose time does not increase."""
        with self._lock:
            times = np.array(self._times_s, np.float64)
            arrived = np.array(self._arrived_ns, np.int64)
            watts = np.array(self._watts, np.float64)
            gpio = np.array(self._gpio, np.bool_)
            lost = self.lost
        if gpio.size != watts.size:  # the column exists since the header, so this is a damaged stream
            gpio = np.empty(0, np.bool_)
        has_time = has_time and times.size > 0
        times_ns, clock_problem = self._convert(times, arrived) if has_time else (arrived, "")
        kept = np.ones(times_ns.size, np.bool_)
        if times_ns.size > 1:
            kept[1:] = times_ns[1:] > np.maximum.accumulate(times_ns)[:-1]
        # Without a time, lines that arrive in the same instant have no times of their own: only the first counts.
        dropped = int((~kept).sum())
        return PowerSamples(
            times_ns=times_ns[kept],
            watts=watts[kept],
            gpio=gpio[kept] if gpio.size else gpio,
            lost=lost if has_time else lost + dropped,
            invalid=self.invalid,
            unordered=dropped if has_time else 0,
            problem=problem,
            clock_problem=clock_problem,
        )

    def _convert(self, times_s: Floats, arrived_ns: Nanoseconds) -> tuple[Nanoseconds, str]:
        """Return the times on this machine's clock, and why they are wrong, or ""."""
        if self._clock not in (_MONOTONIC, _EPOCH):
            return align_by_arrival(times_s, arrived_ns)
        offset = time.time_ns() - get_time_ns() if self._clock == _EPOCH else 0
        times_ns = np.round(times_s * 1e9).astype(np.int64) - offset
        delay = int((arrived_ns - times_ns).min())
        problem = ""
        if delay < -_MAX_FUTURE_NS:
            problem = f"the {self._clock} clock of the meter is {-delay / 1e9:.3g} s ahead of this machine's clock"
        elif delay > _MAX_DELAY_NS:
            problem = (
                f"all samples arrive at least {delay / 1e9:.3g} s after their time: the {self._clock} clock of the "
                "meter is behind this machine's clock"
            )
        return times_ns, problem


def align_by_arrival(times_s: Floats, arrived_ns: Nanoseconds) -> tuple[Nanoseconds, str]:
    """Convert the times of a meter to this machine's clock, from the arrival of the samples.

    Also return why the clocks do not fit, or "".

    A sample never arrives before its time. So the line below all delays, close to the smallest delay in the first and
    in the last part of the measurement, gives offset and drift of the meter's clock.
    """
    base_s, base_ns = float(times_s[0]), int(arrived_ns[0])
    meter = (times_s - base_s) * 1e9
    delay = (arrived_ns - base_ns).astype(np.float64) - meter
    # Later parts refine the drift. A short measurement has no measurable drift.
    parts = np.array_split(np.arange(meter.size), min(_ALIGNED_PARTS, max(meter.size // 10, 1)))
    least = [int(part[np.argmin(delay[part])]) for part in parts]
    first, last = least[0], least[-1]
    span = meter[last] - meter[first]
    drift = float((delay[last] - delay[first]) / span) if span > 0 and len(least) > 1 else 0.0
    problem = ""
    if abs(drift) > MAX_DRIFT and (abs(drift) - MAX_DRIFT) * span > _MAX_SHIFT_NS:
        problem = (
            f"{span / 1e9:.3g} s of the meter's clock are {span * (1 + drift) / 1e9:.3g} s on this machine's clock: "
            "check the unit of the column time"
        )
    drift = min(max(drift, -MAX_DRIFT), MAX_DRIFT)
    offset = float((delay - drift * meter)[least].min())
    return np.round(meter + drift * meter + offset).astype(np.int64) + base_ns, problem

"""Power samples of a meter, and the energy of time intervals."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = "npt.NDArray[np.float64]"
Nanoseconds: TypeAlias = "npt.NDArray[np.int64]"

# More samples are not stored. At 10 kHz, this is over 16 minutes.
MAX_SAMPLES = 10_000_000


@dataclass(frozen=True, eq=False)
class PowerSamples:
    """Samples in time order: power in watts, or the reading of an energy counter in joules.

    Attributes:
        times_ns: int64 [n], strictly increasing, on the clock of :func:`hil.core.clock.get_time_ns` of this machine.
        watts: float64 [n]; empty if the meter counts energy.
        joules: float64 [n], energy since an arbitrary start, without wrap-around; empty if the meter measures power.
        gpio: bool [n]; empty if the meter has no such input.
        lost: samples that the meter could not deliver, as far as it knows.
        invalid: samples without a valid number, such as NaN, which are left out.
        unordered: samples whose time is not after the sample before, which are left out.
        clock_problem: why the times are not on this machine's clock; "" if they are.
        problem: why the meter stopped before :meth:`Meter.stop`; "" if it did not.
        clock: ``board`` if the times are on the board's clock.
    """

    times_ns: Nanoseconds = field(default_factory=lambda: np.empty(0, np.int64))
    watts: Floats = field(default_factory=lambda: np.empty(0, np.float64))
    joules: Floats = field(default_factory=lambda: np.empty(0, np.float64))
    gpio: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    lost: int = 0
    invalid: int = 0
    unordered: int = 0
    problem: str = ""
    clock_problem: str = ""
    clock: Literal["host", "board"] = "host"

    @property
    def period_ns(self) -> float:
        """Median distance between samples; 0 with fewer than two samples."""
        return float(np.median(np.diff(self.times_ns))) if self.times_ns.size > 1 else 0.0

    def find(self, start_ns: int, end_ns: int) -> slice:
        """Return the indices of the samples in a closed interval."""
        first = int(np.searchsorted(self.times_ns, start_ns, "left"))
        return slice(first, max(int(np.searchsorted(self.times_ns, end_ns, "right")), first))

    def compute_energy(self, start_ns: int, end_ns: int) -> float:
        """Return the energy in joules between two times, by the trapezoid rule.

        Only samples inside the interval count. At its edges, the power of the first and last sample is assumed, because
        a sample outside may belong to another state of the board. Raises ValueError with fewer than two samples inside.
        """
        inside = self.find(start_ns, end_ns)
        times = self.times_ns[inside]
        if times.size < 2:
            raise ValueError("fewer than two samples in the interval")
        # Relative to the start, the times are exact in float64.
        at_s = (times - start_ns) / 1e9
        length_s = (end_ns - start_ns) / 1e9
        if self.joules.size:
            joules = self.joules[inside]
            return float((joules[-1] - joules[0]) / (at_s[-1] - at_s[0]) * length_s)
        watts = self.watts[inside]
        middle = float(((watts[1:] + watts[:-1]) / 2 * np.diff(at_s)).sum())
        return float(middle + watts[0] * at_s[0] + watts[-1] * (length_s - at_s[-1]))

    def compute_power(self, start_ns: int, end_ns: int) -> float:
        """Return the mean power in watts between two times. Raises ValueError with fewer than two samples inside."""
        return self.compute_energy(start_ns, end_ns) / ((end_ns - start_ns) / 1e9)

    def find_peak(self, start_ns: int, end_ns: int) -> float:
        """Return the highest power of a sample between two times; 0.0 with fewer than two samples inside."""
        inside = self.find(start_ns, end_ns)
        values = list_watts(replace_range(self, inside))
        return float(values.max()) if values.size else 0.0

    def find_gap(self, start_ns: int, end_ns: int) -> float:
        """Return the longest time without samples in an interval, in nanoseconds.

        For an energy counter, only the gaps at both ends matter, because it also counts between two samples.
        """
        inside = self.times_ns[self.find(start_ns, end_ns)]
        gaps = np.diff(np.concatenate([[start_ns], inside, [end_ns]]))
        return float((gaps[[0, -1]] if self.joules.size else gaps).max())


def replace_range(samples: PowerSamples, inside: slice) -> PowerSamples:
    """Return a part of the samples."""
    names = ("times_ns", "watts", "joules", "gpio")
    return replace(samples, **{name: getattr(samples, name)[inside] for name in names})


def list_watts(samples: PowerSamples) -> Floats:
    """Return the power of each sample. For an energy counter, return the mean power since the sample before.

    Without a value for each time, as a meter of a package may return, return an empty array.
    """
    values = samples.joules if samples.joules.size else samples.watts
    if values.size != samples.times_ns.size or 0 < samples.joules.size < 2:
        return np.empty(0, np.float64)
    if not samples.joules.size:
        return samples.watts
    powers: Floats = np.diff(samples.joules) / (np.diff(samples.times_ns) / 1e9)
    return np.concatenate([powers[:1], powers])


def make_sensor_samples(
    times_ns: Nanoseconds,
    values: Floats,
    *,
    counts_energy: bool,
    lost: int = 0,
    problem: str = "",
    clock: Literal["host", "board"] = "host",
) -> PowerSamples:
    """Return the samples of a sensor of the kernel: watts, or joules of an energy counter."""
    if not counts_energy:
        return PowerSamples(times_ns, values, lost=lost, problem=problem, clock=clock)
    # The counter changes about once a millisecond: a repeated value has no time of its own.
    kept = np.ones(values.size, np.bool_)
    kept[1:] = np.diff(values) > 0
    if values.size and kept.sum() < 2:
        kept[:] = True  # a counter that stands still
    return PowerSamples(times_ns[kept], joules=values[kept], lost=lost, problem=problem, clock=clock)


class Meter(Protocol):
    """Meter of a board's power. A package provides one through the entry-point group ``hil.meters``."""

    def start(self) -> None:
        """Start to sample. Raises UsageError or BoardUnfit."""

    def read(self) -> PowerSamples:
        """Return the samples since the start. Never raises: a problem is a field of the samples."""

    def stop(self) -> None:
        """Stop to sample, within about two seconds. :meth:`read` still returns the samples."""

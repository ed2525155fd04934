"""Meters of this machine's kernel: power sensors (hwmon) and energy counters (RAPL, powercap)."""

from __future__ import annotations

import glob
import threading
from array import array
from pathlib import Path

import numpy as np

from hil.controller.devices.metering.samples import MAX_SAMPLES, Floats, Nanoseconds, PowerSamples
from hil.core.clock import get_time_ns
from hil.core.meter_config import MeterConfig
from hil.errors import UsageError

_MAX_BYTES = 64
_END_SECONDS = 1.0
_MICRO, _MILLI = 1e-6, 1e-3


class SysfsMeter:
    """Meter that reads files of the kernel at a fixed rate in a thread. Subclasses find and convert the values."""

    def __init__(self, config: MeterConfig) -> None:
        self._config = config
        self._times_ns = array("q")
        self._values = array("d")
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None
        self._problem = ""

    def start(self) -> None:
        """Check the files, and start to sample. Raises UsageError if a file is missing or unreadable."""
        self._open_files()
        try:
            self._read_value()
        except (OSError, ValueError) as error:
            raise UsageError(
                f"cannot read the meter {self._config.path}: {getattr(error, 'strerror', None) or error}",
                hint="check [meter] path in the board's config, and the permissions of the file",
            ) from error
        self._thread = threading.Thread(target=self._collect, daemon=True, name="hil-meter")
        self._thread.start()

    def stop(self) -> None:
        """Stop to sample."""
        self._leaving.set()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def read(self) -> PowerSamples:
        """Return the samples so far."""
        with self._lock:
            times, values = np.array(self._times_ns, np.int64), np.array(self._values, np.float64)
        return self._make_samples(times, values)

    def _open_files(self) -> None:
        raise NotImplementedError

    def _read_value(self) -> float:
        raise NotImplementedError

    def _make_samples(self, times: Nanoseconds, values: Floats) -> PowerSamples:
        raise NotImplementedError

    def _collect(self) -> None:
        period_ns = round(1e9 / self._config.rate_hz)
        due = get_time_ns()
        while not self._leaving.wait(max(due - get_time_ns(), 0) / 1e9) and len(self._values) < MAX_SAMPLES:
            before = get_time_ns()
            try:
                value = self._read_value()
            except (OSError, ValueError) as error:
                self._problem = f"reading the meter failed: {getattr(error, 'strerror', None) or error}"
                return
            # The kernel took the value between the two times.
            at = (before + get_time_ns()) // 2
            with self._lock:
                if not self._times_ns or at > self._times_ns[-1]:
                    self._times_ns.append(at)
                    self._values.append(value)
            # After a pause of this process, continue from now instead of sampling in a burst.
            due = max(due + period_ns, get_time_ns())


class HwmonMeter(SysfsMeter):
    """Power sensor of the kernel, such as an INA226: the file of the power, or of voltage and current."""

    def _open_files(self) -> None:
        folder, channel = _find_folder(self._config.path), self._config.channel
        power, volts, amps = (folder / f"{name}{channel}_input" for name in ("power", "in", "curr"))
        if power.exists():
            self._files, self._factor = [power], _MICRO
        elif volts.exists() and amps.exists():
            self._files, self._factor = [volts, amps], _MILLI
        else:
            raise UsageError(
                f"{folder} has no power sensor for channel {channel}",
                hint=f"expected power{channel}_input, or in{channel}_input and curr{channel}_input",
            )

    def _read_value(self) -> float:
        found = 1.0
        for path in self._files:
            found *= _read_number(path) * self._factor
        return found

    def _make_samples(self, times: Nanoseconds, values: Floats) -> PowerSamples:
        return PowerSamples(times, values, problem=self._problem)


class RaplMeter(SysfsMeter):
    """Energy counter of a processor (RAPL), which starts again from 0 after its range."""

    def _open_files(self) -> None:
        folder = _find_folder(self._config.path)
        self._file = folder / "energy_uj"
        try:
            self._range = _read_number(folder / "max_energy_range_uj")
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{folder} is not an energy counter: {getattr(error, 'strerror', None) or error}",
                hint="list the counters with ls /sys/class/powercap",
            ) from error

    def _read_value(self) -> float:
        return _read_number(self._file)

    def _make_samples(self, times: Nanoseconds, values: Floats) -> PowerSamples:
        joules = unwrap_counter(values, self._range) * _MICRO
        # The counter changes about once a millisecond: a repeated value has no time of its own.
        kept = np.ones(values.size, np.bool_)
        kept[1:] = np.diff(joules) > 0
        if values.size and kept.sum() < 2:
            kept[:] = True  # a counter that stands still
        return PowerSamples(times[kept], joules=joules[kept], problem=self._problem)


def unwrap_counter(values: Floats, counter_range: float) -> Floats:
    """Return the total of a counter that starts again from 0 after ``counter_range``."""
    steps = np.diff(values)
    steps[steps < 0] += counter_range + 1
    return np.concatenate([np.zeros(min(values.size, 1)), np.cumsum(steps)])


def _find_folder(pattern: str) -> Path:
    """Return the directory of a path with wildcards, because the kernel numbers its sensors at each boot."""
    found = [pattern]
    if glob.has_magic(pattern):
        found = sorted(glob.glob(pattern))  # noqa: PTH207 - the whole path is the pattern
    if len(found) != 1 or not Path(found[0]).is_dir():
        what = f"matches {len(found)} directories" if len(found) != 1 else "is not a directory"
        raise UsageError(f"the meter's path {pattern} {what}", hint="correct [meter] path in the board's config")
    return Path(found[0])


def _read_number(path: Path) -> float:
    """Return the number in a file of the kernel. Raises OSError and ValueError."""
    with path.open("rb") as file:
        text = file.read(_MAX_BYTES)
    try:
        return float(int(text))
    except ValueError:
        raise ValueError(f"{path} contains {text[:20]!r}, not a number") from None

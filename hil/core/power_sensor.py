"""Read power sensors (hwmon) and energy counters (RAPL, powercap) of this machine's kernel.

hil reads them on the host, and the agent on a board.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Protocol

from hil.core.clock import get_time_ns
from hil.core.text import escape_controls
from hil.errors import UsageError

SENSOR_KINDS = ("hwmon", "rapl")
RAPL_FOLDER = "/sys/class/powercap/intel-rapl:0"
# Lowest rate of samples: a slower meter cannot measure a window.
MIN_RATE_HZ = 0.1
# Highest rate of samples. The values of faster sensors do not change between two samples.
MAX_RATE_HZ = 10_000.0
_HWMON_FOLDERS = "/sys/class/hwmon/hwmon*"
_MAX_BYTES = 64
_MAX_PATH, _MAX_WILDCARDS = 1000, 3
# Sensors that a hint lists.
_MAX_LISTED = 6
_MICRO, _MILLI = 1e-6, 1e-3
# A wrap-around adds at most this energy, and this power since the reading before. A counter that was set back seems to
# add the rest of its range.
_MAX_WRAP_JOULES, _MAX_WRAP_WATTS = 100.0, 10_000.0


class PowerSensor(Protocol):
    """Sensor that returns its current value."""

    counts_energy: bool  # True if the value is an energy in joules, not a power in watts

    def read_value(self) -> float:
        """Return the power, or the energy since the first call. Raises OSError or ValueError."""


def open_sensor(kind: str, path: str, channel: int) -> PowerSensor:
    """Return a sensor that was read successfully.

    Args:
        kind: value of :data:`SENSOR_KINDS`.
        path: directory of the sensor. It may contain wildcards, because the kernel numbers its sensors at each boot.

    Raises:
        UsageError: the sensor is missing or unreadable, with a hint.
    """
    if kind not in SENSOR_KINDS:
        raise UsageError(f"unknown kind of sensor {kind[:50]!r}", hint=f"expected {' or '.join(SENSOR_KINDS)}")
    folder = _find_folder(path, kind)
    try:
        sensor: PowerSensor = HwmonSensor(folder, channel) if kind == "hwmon" else RaplCounter(folder)
        sensor.read_value()
    except PermissionError as error:
        raise UsageError(
            f"permission denied: cannot read {error.filename or folder}",
            hint=f"read it as root, or allow it with `sudo chmod a+r {error.filename or folder}`",
        ) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read the sensor {folder}: {reason}", hint=_list_sensors(kind)) from error
    return sensor


class HwmonSensor:
    """Power sensor, such as an INA226: the file of the power, or of voltage and current."""

    counts_energy = False

    def __init__(self, folder: Path, channel: int) -> None:
        power, volts, amps = (folder / f"{name}{channel}_input" for name in ("power", "in", "curr"))
        if power.exists():
            self._files, self._factor = [power], _MICRO
        elif volts.exists() and amps.exists():
            self._files, self._factor = [volts, amps], _MILLI
        else:
            raise UsageError(
                f"{folder} has no power sensor for channel {channel}: expected power{channel}_input, or "
                f"in{channel}_input and curr{channel}_input",
                hint=_list_sensors("hwmon"),
            )

    def read_value(self) -> float:
        """Return the power in watts."""
        found = 1.0
        for path in self._files:
            found *= _read_number(path) * self._factor
        return found


class RaplCounter:
    """Energy counter of a processor (RAPL), which starts again from 0 after its range."""

    counts_energy = True

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        try:
            self._range = _read_number(folder / "max_energy_range_uj")
        except PermissionError:
            raise
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{folder} is not an energy counter: {getattr(error, 'strerror', None) or error}",
                hint="list the counters with ls /sys/class/powercap",
            ) from error
        self._last: int | None = None
        self._last_ns = 0
        self._total = 0

    def read_value(self) -> float:
        """Return the energy in joules since the first call, across wrap-arounds. Raises ValueError after a reset."""
        value, now_ns = _read_number(self._file), get_time_ns()
        step = 0 if self._last is None else value - self._last
        if step < 0:
            step += self._range + 1
            most = _MAX_WRAP_JOULES + _MAX_WRAP_WATTS * (now_ns - self._last_ns) / 1e9
            if step < 0 or step > self._range / 2 or step * _MICRO > most:
                raise ValueError(f"the energy counter went back from {self._last} to {value}")
        self._last, self._last_ns = value, now_ns
        self._total += step
        return self._total * _MICRO


def _find_folder(pattern: str, kind: str) -> Path:
    found = [pattern]
    wildcards = sum(map(glob.has_magic, pattern.split("/")))
    if not pattern.startswith("/"):
        raise UsageError(f"the meter's path {escape_controls(pattern[:100])!r} is not absolute")
    if len(pattern) > _MAX_PATH or wildcards > _MAX_WILDCARDS or "\0" in pattern:
        raise UsageError(f"the meter's path {escape_controls(pattern[:100])} is too long, or has too many wildcards")
    if wildcards:
        found = sorted(glob.glob(pattern))  # noqa: PTH207 - the whole path is the pattern
    if len(found) != 1 or not Path(found[0]).is_dir():
        what = f"matches {len(found)} directories" if len(found) != 1 else "is not a directory"
        raise UsageError(
            f"the meter's path {escape_controls(pattern)} {what}",
            hint=f"correct [meter] path in the board's config; {_list_sensors(kind)}",
        )
    return Path(found[0])


def _list_sensors(kind: str) -> str:
    """Return a hint that lists the sensors of this machine."""
    if kind == "rapl":
        found = sorted(str(one.parent) for one in Path("/sys/class/powercap").glob("*/energy_uj"))
    else:
        files = sorted(glob.glob(f"{_HWMON_FOLDERS}/power*_input"))  # noqa: PTH207 - a constant pattern
        found = [f"{Path(one).parent} (channel {Path(one).name[5:-6]})" for one in files]
    if not found:
        return f"this machine has no {kind} sensor"
    return f"sensors of this machine: {', '.join(found[:_MAX_LISTED])}"


def _read_number(path: Path) -> int:
    """Return the number in a file of the kernel. Raises OSError and ValueError."""
    # Never wait for a writer if the file is a pipe.
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        text = os.read(file, _MAX_BYTES)
    finally:
        os.close(file)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{path} contains {text[:20]!r}, not a number") from None

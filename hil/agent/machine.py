"""Machine description, sensor readings, and performance counters of the board."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hil.core import cpuinfo
from hil.core.clock import get_time_ns
from hil.protocol.v1 import agent_pb2 as pb

_ROOT = Path("/")
# The firmware of a Raspberry Pi lowers the clock silently. Only get_throttled reports this.
_WATCHED = (
    "sys/devices/system/cpu/cpufreq/policy*/scaling_cur_freq",
    "sys/devices/system/cpu/cpufreq/policy*/scaling_max_freq",
    "sys/devices/system/cpu/cpufreq/policy*/scaling_governor",
    "sys/class/thermal/*/type",
    "sys/class/thermal/thermal_zone*/temp",
    "sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/*_throttle_count",
    "sys/devices/platform/soc*/soc*firmware/get_throttled",
    "sys/class/thermal/cooling_device*/cur_state",
    "proc/meminfo",
)
_MAX_BYTES = 1 << 16
_CORE = re.compile(rb"^cpu(\d+) (.*)$", re.M)
_AVAILABLE = re.compile(rb"^MemAvailable:\s*(\d+) kB", re.M)
_OOM_KILLS = re.compile(rb"^oom_kill (\d+)", re.M)
_STALLED = re.compile(rb"^some .*total=(\d+)", re.M)
# Columns of /proc/stat: idle and I/O wait times, and all times except guest times, which user times include.
_IDLE = slice(3, 5)
_TIMES = slice(0, 8)


@functools.cache
def describe_machine() -> pb.Machine:
    """Return the CPU, memory and system. Fields that the machine does not expose stay empty."""
    arch = platform.machine()
    cpu = cpuinfo.parse_cpu_info(arch, _read_text(Path("/proc/cpuinfo")), _read_bytes(Path("/proc/self/auxv")))
    return pb.Machine(
        hostname=platform.node(),
        system=platform.system(),
        kernel=platform.release(),
        arch=arch,
        libc=" ".join(platform.libc_ver()),
        python=platform.python_version(),
        cpu_model=cpu.model or _read_text(Path("/proc/device-tree/model")).rstrip("\0"),
        cpu_features=cpu.features,
        cores=os.cpu_count() or 1,
        memory_bytes=get_memory_bytes(),
        boot_id=_read_text(Path("/proc/sys/kernel/random/boot_id")),
        cpu_parts=cpu.parts,
    )


def get_memory_bytes() -> int:
    """Return the physical memory in bytes, or 0 if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


# Control group controller -> mount point and limit file; "" is cgroup version 2.
_CGROUPS = {"": ("sys/fs/cgroup", "memory.max"), "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes")}


def get_memory_limit(root: Path = _ROOT) -> int:
    """Return the memory limit of this process and child processes: the machine's memory or a lower cgroup limit."""
    limits = [get_memory_bytes()]
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":/")
        for name in _CGROUPS.keys() & set(controllers.split(",")):
            mount, file = _CGROUPS[name]
            place = root / mount / group
            # A group's limit applies to all its descendants. In a container, only the container's group is visible.
            while place.is_relative_to(root / mount):
                limits.append(_limit(place / file))
                place = place.parent
    return min((limit for limit in limits if limit), default=0)


def _limit(file: Path) -> int:
    text = _read_text(file)
    return int(text) if text.isdecimal() else 0


def count_oom_kills() -> int:
    """Return how many processes the OOM killer has killed since boot, or 0 if unknown."""
    match = _OOM_KILLS.search(_read_bytes(Path("/proc/vmstat")))
    return int(match[1]) if match else 0


def get_board_id() -> str:
    """Return an identifier that survives agent restarts: the machine id if present, else the host name."""
    return _read_text(Path("/etc/machine-id")) or platform.node()


def collect_readings(root: Path = _ROOT) -> list[pb.Reading]:
    """Return the values that may change while a program runs, with names from :func:`hil.core.cpuinfo.get_readings`."""
    files = [file for pattern in _WATCHED for file in sorted(root.glob(pattern), key=_find_numbers)]
    return _change(
        [pb.Reading(**found) for found in cpuinfo.get_readings({str(file): _read_text(file) for file in files})]
    )


_change: Callable[[list[pb.Reading]], list[pb.Reading]] = list


def replace_readings(change: Callable[[list[pb.Reading]], list[pb.Reading]]) -> None:
    """Change this process's readings and counters before they are returned, for a simulated board."""
    global _change
    _change = change


def _find_numbers(path: Path) -> list[int]:
    return [int(digits) for digits in re.findall("[0-9]+", str(path))]


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


class Counters:
    """Counters of the board. Use as a context manager, which closes the open files.

    The available sources are detected once. Missing sources are skipped.

    - ``cpuN busy`` and ``PRESSURE pressure`` (share of time stalled on CPU, memory or disk): % since the last sample,
      so the first sample lacks them
    - ``cpuN frequency``: MHz
    - ``ZONE (TYPE)``: degC
    - ``memory available``, ``agent memory``, ``worker PID memory``: bytes
    """

    def __init__(self, worker_pids: Callable[[], list[int]], root: Path = _ROOT) -> None:
        self._worker_pids = worker_pids
        self._proc = root / "proc"
        self._files: dict[Path, int] = {}
        self._gone: set[Path] = set()
        cpu, thermal = root / "sys/devices/system/cpu/cpufreq", root / "sys/class/thermal"
        policies, zones = (
            sorted(cpu.glob("policy*"), key=_find_numbers),
            sorted(thermal.glob("thermal_zone*"), key=_find_numbers),
        )
        self._frequencies = {f"cpu{_find_numbers(one)[-1]} frequency": one / "scaling_cur_freq" for one in policies}
        self._zones = {f"{one.name} ({_read_text(one / 'type')})": one / "temp" for one in zones}
        self._busy: dict[int, tuple[int, int]] = {}
        self._stalled: dict[str, tuple[float, int]] = {}

    def read_counters(self) -> pb.CounterSample:
        """Return the current value of all counters."""
        at = get_time_ns()
        found = [
            *self._read_cores(),
            *self._read_sensors(),
            *self._read_memory(),
            *self._read_pressure(),
            *self._read_processes(),
        ]
        readings = [pb.Reading(name=name, value=value, unit=unit) for name, value, unit in found]
        return pb.CounterSample(clock_ns=at, readings=_change(readings))

    def _read_cores(self) -> Iterator[tuple[str, float, str]]:
        for match in _CORE.finditer(self._read(self._proc / "stat")):
            core, times = int(match[1]), [int(text) for text in match[2].split()]
            total, idle = sum(times[_TIMES]), sum(times[_IDLE])
            total_before, idle_before = self._busy.get(core, (total, idle))
            if total > total_before:
                share = 1 - (idle - idle_before) / (total - total_before)
                yield f"cpu{core} busy", 100 * min(max(share, 0.0), 1.0), "%"
                self._busy[core] = total, idle
            self._busy.setdefault(core, (total, idle))

    def _read_sensors(self) -> Iterator[tuple[str, float, str]]:
        for files, unit in ((self._frequencies, "MHz"), (self._zones, "degC")):
            for name, file in files.items():
                with contextlib.suppress(ValueError):  # an empty file, or "<unknown>" from a driver
                    yield name, int(self._read(file)) / 1000, unit

    def _read_memory(self) -> Iterator[tuple[str, float, str]]:
        if match := _AVAILABLE.search(self._read(self._proc / "meminfo")):
            yield "memory available", int(match[1]) * 1024, "bytes"

    def _read_pressure(self) -> Iterator[tuple[str, float, str]]:
        for kind in ("cpu", "memory", "io"):
            match = _STALLED.search(self._read(self._proc / "pressure" / kind))
            now = time.monotonic()
            if match is None:
                continue
            before, stalled_before = self._stalled.get(kind, (now, 0))
            self._stalled[kind] = now, int(match[1])
            if now > before:
                share = (int(match[1]) - stalled_before) / 1e6 / (now - before)
                yield f"{kind} pressure", 100 * min(max(share, 0.0), 1.0), "%"

    def _read_processes(self) -> Iterator[tuple[str, float, str]]:
        mine, workers = self._proc / str(os.getpid()) / "statm", {}
        for pid in self._worker_pids():
            workers[self._proc / str(pid) / "statm"] = f"worker {pid} memory"
        for left in [file for file in self._files if file.name == "statm" and file != mine and file not in workers]:
            os.close(self._files.pop(left))
        for file, name in {mine: "agent memory", **workers}.items():
            if fields := self._read(file).split():
                yield name, int(fields[1]) * os.sysconf("SC_PAGE_SIZE"), "bytes"

    def _read(self, file: Path) -> bytes:
        """Read a file from the start through a cached descriptor. Return b"" if it is unreadable."""
        if file in self._gone:
            return b""
        try:
            if file not in self._files:
                self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._gone.add(file)
            return b""
        # A sleeping sensor or an offline core may fail now and work later.
        with contextlib.suppress(OSError):
            return os.pread(self._files[file], _MAX_BYTES, 0)
        return b""

    def __enter__(self) -> Counters:
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

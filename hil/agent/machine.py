"""What the board is and how it does: probed once, read when asked, and counted while programs run."""

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
from hil.core.clock import now_ns
from hil.protocol.v1 import agent_pb2 as pb

_ROOT = Path("/")
# A Raspberry Pi's firmware lowers the clock by itself; only get_throttled tells.
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
_MOST_BYTES = 1 << 16
_CORE = re.compile(rb"^cpu(\d+) (.*)$", re.M)
_AVAILABLE = re.compile(rb"^MemAvailable:\s*(\d+) kB", re.M)
_STALLED = re.compile(rb"^some .*total=(\d+)", re.M)
# In a line of /proc/stat: the times that a core was idle or waited for a disk, and those that are counted twice.
_IDLE = slice(3, 5)
_TIMES = slice(0, 8)


@functools.cache
def machine() -> pb.Machine:
    """CPU, memory and system. What the machine does not show stays empty."""
    arch = platform.machine()
    cpu = cpuinfo.cpu_info(arch, _text(Path("/proc/cpuinfo")), _bytes(Path("/proc/self/auxv")))
    return pb.Machine(
        hostname=platform.node(),
        system=platform.system(),
        kernel=platform.release(),
        arch=arch,
        libc=" ".join(platform.libc_ver()),
        python=platform.python_version(),
        cpu_model=cpu.model or _text(Path("/proc/device-tree/model")).rstrip("\0"),
        cpu_features=cpu.features,
        cores=os.cpu_count() or 1,
        memory_bytes=memory_bytes(),
        boot_id=_text(Path("/proc/sys/kernel/random/boot_id")),
        cpu_parts=cpu.parts,
    )


def memory_bytes() -> int:
    """The machine's physical memory, or 0 where it does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


def board_id() -> str:
    """An identity that outlives the agent: the machine id where there is one, else the host's name."""
    return _text(Path("/etc/machine-id")) or platform.node()


def readings(root: Path = _ROOT) -> list[pb.Reading]:
    """What may change while a program runs, as :func:`hil.core.cpuinfo.readings` names it."""
    files = [file for pattern in _WATCHED for file in sorted(root.glob(pattern), key=_numbers)]
    return [pb.Reading(**found) for found in cpuinfo.readings({str(file): _text(file) for file in files})]


def _numbers(path: Path) -> list[int]:
    return [int(digits) for digits in re.findall("[0-9]+", str(path))]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


class Counters:
    """The board's counters. A context manager: it keeps files open.

    Found out once what the machine shows; the rest is left out. ``cpuN busy`` and ``PRESSURE pressure`` (the share of
    time that something waited for CPU, memory or disk) are % since the look before, so the first look has none;
    ``cpuN frequency`` is MHz, ``ZONE (TYPE)`` degC; ``memory available``, ``agent memory`` and ``worker PID memory``
    are bytes.
    """

    def __init__(self, worker_pids: Callable[[], list[int]], root: Path = _ROOT) -> None:
        self._worker_pids = worker_pids
        self._proc = root / "proc"
        self._files: dict[Path, int] = {}
        self._gone: set[Path] = set()
        cpu, thermal = root / "sys/devices/system/cpu/cpufreq", root / "sys/class/thermal"
        policies, zones = sorted(cpu.glob("policy*"), key=_numbers), sorted(thermal.glob("thermal_zone*"), key=_numbers)
        self._frequencies = {f"cpu{_numbers(one)[-1]} frequency": one / "scaling_cur_freq" for one in policies}
        self._zones = {f"{one.name} ({_text(one / 'type')})": one / "temp" for one in zones}
        self._busy: dict[int, tuple[int, int]] = {}
        self._stalled: dict[str, tuple[float, int]] = {}

    def look(self) -> pb.CounterSample:
        """All counters now."""
        at = now_ns()
        found = [*self._cores(), *self._sensors(), *self._memory(), *self._pressure(), *self._processes()]
        readings = [pb.Reading(name=name, value=value, unit=unit) for name, value, unit in found]
        return pb.CounterSample(clock_ns=at, readings=readings)

    def _cores(self) -> Iterator[tuple[str, float, str]]:
        for match in _CORE.finditer(self._read(self._proc / "stat")):
            core, times = int(match[1]), [int(text) for text in match[2].split()]
            total, idle = sum(times[_TIMES]), sum(times[_IDLE])
            total_before, idle_before = self._busy.get(core, (total, idle))
            if total > total_before:
                share = 1 - (idle - idle_before) / (total - total_before)
                yield f"cpu{core} busy", 100 * min(max(share, 0.0), 1.0), "%"
                self._busy[core] = total, idle
            self._busy.setdefault(core, (total, idle))

    def _sensors(self) -> Iterator[tuple[str, float, str]]:
        for files, unit in ((self._frequencies, "MHz"), (self._zones, "degC")):
            for name, file in files.items():
                with contextlib.suppress(ValueError):  # nothing, or a driver's "<unknown>"
                    yield name, int(self._read(file)) / 1000, unit

    def _memory(self) -> Iterator[tuple[str, float, str]]:
        if match := _AVAILABLE.search(self._read(self._proc / "meminfo")):
            yield "memory available", int(match[1]) * 1024, "bytes"

    def _pressure(self) -> Iterator[tuple[str, float, str]]:
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

    def _processes(self) -> Iterator[tuple[str, float, str]]:
        mine, workers = self._proc / str(os.getpid()) / "statm", {}
        for pid in self._worker_pids():
            workers[self._proc / str(pid) / "statm"] = f"worker {pid} memory"
        for left in [file for file in self._files if file.name == "statm" and file != mine and file not in workers]:
            os.close(self._files.pop(left))
        for file, name in {mine: "agent memory", **workers}.items():
            if fields := self._read(file).split():
                yield name, int(fields[1]) * os.sysconf("SC_PAGE_SIZE"), "bytes"

    def _read(self, file: Path) -> bytes:
        """A file's content from its start, through the descriptor that is kept; nothing where it cannot be read."""
        if file in self._gone:
            return b""
        try:
            if file not in self._files:
                self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._gone.add(file)
            return b""
        # A sensor that is asleep, or a core's that is off, may fail now and tell the next time.
        with contextlib.suppress(OSError):
            return os.pread(self._files[file], _MOST_BYTES, 0)
        return b""

    def __enter__(self) -> Counters:
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

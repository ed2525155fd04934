"""What a board tells of itself while programs run: a look costs microseconds a file, for the files stay open."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from hil.core.clock import now_ns
from hil.protocol.v1 import agent_pb2 as pb

_ROOT = Path("/")
_MOST_BYTES = 1 << 16
_CORE = re.compile(rb"^cpu(\d+) (.*)$", re.M)
_AVAILABLE = re.compile(rb"^MemAvailable:\s*(\d+) kB", re.M)
_STALLED = re.compile(rb"^some .*total=(\d+)", re.M)
# In a line of /proc/stat: the times that a core was idle or waited for a disk, and those that are counted twice.
_IDLE = slice(3, 5)
_TIMES = slice(0, 8)


class Counters:
    """The board's counters. A context manager: it keeps files open.

    Found out once what the machine shows; the rest is left out. ``cpuN busy`` and ``PRESSURE pressure`` (the share of
    time that something waited for CPU, memory or disk) are % since the look before, so the first look has none;
    ``cpuN frequency`` is MHz, ``ZONE (TYPE)`` degC; ``memory available``, ``agent memory`` and ``worker PID memory``
    are bytes.

    Args:
        worker_pids: the processes of the programs that are loaded now.
        root: the folder that has ``sys`` and ``proc``.
    """

    def __init__(self, worker_pids: Callable[[], list[int]], root: Path = _ROOT) -> None:
        self._worker_pids = worker_pids
        self._proc = root / "proc"
        self._files: dict[Path, int] = {}
        self._gone: set[Path] = set()
        cpu, thermal = root / "sys/devices/system/cpu/cpufreq", root / "sys/class/thermal"
        self._frequencies = {
            f"cpu{_number(one)} frequency": one / "scaling_cur_freq" for one in _by_number(cpu, "policy")
        }
        self._zones = {f"{one.name} ({_type(one)})": one / "temp" for one in _by_number(thermal, "thermal_zone")}
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

    def close(self) -> None:
        """Let the files go."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __enter__(self) -> Counters:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _by_number(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.glob(f"{kind}*"), key=_number)


def _number(path: Path) -> int:
    return int("".join(filter(str.isdigit, path.name)) or 0)


def _type(zone: Path) -> str:
    try:
        return (zone / "type").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""

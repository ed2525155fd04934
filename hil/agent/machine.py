"""What the board is: probed once, except for readings, which are taken when asked."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

from hil.proto.v1 import agent_pb2 as pb

_CPU = Path("/sys/devices/system/cpu")
_THERMAL = Path("/sys/class/thermal")


@functools.cache
def machine() -> pb.Machine:
    """CPU, memory and system. What the machine does not show stays empty."""
    info = _cpuinfo()
    model = info.get("model name") or info.get("Model") or info.get("Hardware") or platform.processor()
    features = (info.get("flags") or info.get("Features") or "").split()
    return pb.Machine(
        hostname=platform.node(),
        system=platform.system(),
        kernel=platform.release(),
        arch=platform.machine(),
        libc=" ".join(platform.libc_ver()),
        python=platform.python_version(),
        cpu_model=model,
        cpu_features=features,
        cores=os.cpu_count() or 1,
        memory_bytes=memory_bytes(),
        boot_id=_text(Path("/proc/sys/kernel/random/boot_id")) or str(round(time.time() - time.monotonic())),
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


def readings() -> list[pb.Reading]:
    """Frequencies, governors and temperatures, as far as the machine shows them."""
    return list(_readings())


def _readings() -> Iterator[pb.Reading]:
    for cpu in sorted(_CPU.glob("cpu[0-9]*")):
        if kilohertz := _text(cpu / "cpufreq" / "scaling_cur_freq"):
            yield pb.Reading(name=f"{cpu.name} frequency", value=int(kilohertz) / 1000, unit="MHz")
        if governor := _text(cpu / "cpufreq" / "scaling_governor"):
            yield pb.Reading(name=f"{cpu.name} governor", text=governor)
    for zone in sorted(_THERMAL.glob("thermal_zone*")):
        if millidegrees := _text(zone / "temp"):
            with contextlib.suppress(ValueError):
                name = f"{zone.name} ({_text(zone / 'type')})"
                yield pb.Reading(name=name, value=int(millidegrees) / 1000, unit="degC")


def _cpuinfo() -> dict[str, str]:
    found: dict[str, str] = {}
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""

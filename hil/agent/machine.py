"""What the board is: probed once, except for readings, which are taken when asked."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from hil.core.cpuinfo import cpu_info
from hil.protocol.v1 import agent_pb2 as pb

_ROOT = Path("/")
_CPU = "sys/devices/system/cpu"
_THERMAL = "sys/class/thermal"
# A Raspberry Pi's firmware lowers the clock by itself; only this file tells.
_FIRMWARE = "sys/devices/platform/soc*/soc*firmware/get_throttled"


@functools.cache
def machine() -> pb.Machine:
    """CPU, memory and system. What the machine does not show stays empty."""
    arch = platform.machine()
    cpu = cpu_info(arch, _text(Path("/proc/cpuinfo")), _bytes(Path("/proc/self/auxv")))
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
    """What may change while a program runs, as far as the machine shows it.

    ``cpuN frequency``, ``cpuN highest frequency`` (that it is allowed now) and ``cpuN governor``, for the first core of
    each group that shares a clock; ``ZONE (TYPE)`` in degrees; ``free memory``; and of throttling ``throttle events``
    since the boot, ``firmware throttling`` (a Raspberry Pi's bits), and ``cooling_deviceN (TYPE)``, the steps by which
    the CPU is slowed to cool it.

    Args:
        root: the folder that has ``sys`` and ``proc``.
    """
    return [*_frequencies(root), *_temperatures(root), *_throttling(root), *_memory(root)]


def _frequencies(root: Path) -> Iterator[pb.Reading]:
    for policy in sorted((root / _CPU / "cpufreq").glob("policy*"), key=_number):
        name = f"cpu{_number(policy)}"
        for file, meaning in (("scaling_cur_freq", "frequency"), ("scaling_max_freq", "highest frequency")):
            if (kilohertz := _value(policy / file)) is not None:
                yield pb.Reading(name=f"{name} {meaning}", value=kilohertz / 1000, unit="MHz")
        if governor := _text(policy / "scaling_governor"):
            yield pb.Reading(name=f"{name} governor", text=governor)


def _temperatures(root: Path) -> Iterator[pb.Reading]:
    for zone in sorted((root / _THERMAL).glob("thermal_zone*"), key=_number):
        if (millidegrees := _value(zone / "temp")) is not None:
            yield pb.Reading(name=f"{zone.name} ({_text(zone / 'type')})", value=millidegrees / 1000, unit="degC")


def _throttling(root: Path) -> Iterator[pb.Reading]:
    counts = [_value(file) for file in (root / _CPU).glob("cpu[0-9]*/thermal_throttle/*_throttle_count")]
    known = [count for count in counts if count is not None]
    if known:
        yield pb.Reading(name="throttle events", value=sum(known))
    for firmware in root.glob(_FIRMWARE):
        if bits := _text(firmware):
            yield pb.Reading(name="firmware throttling", text=bits)
    for device in sorted((root / _THERMAL).glob("cooling_device*"), key=_number):
        kind = _text(device / "type")
        if ("cpufreq" in kind or kind == "Processor") and (step := _value(device / "cur_state")) is not None:
            yield pb.Reading(name=f"{device.name} ({kind})", value=step)


def _memory(root: Path) -> Iterator[pb.Reading]:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield pb.Reading(name="free memory", value=int(line.split()[1]) / 1024, unit="MiB")


def _number(path: Path) -> int:
    return int("".join(filter(str.isdigit, path.name)) or 0)


def _value(path: Path) -> float | None:
    try:
        return float(_text(path))
    except ValueError:  # nothing, or a driver's "<unknown>"
        return None


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

"""Parse Linux files on a machine's CPU and sensors, read by a board's agent or over a shell."""

from __future__ import annotations

import contextlib
import posixpath
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Architecture from uname -m -> feature line in /proc/cpuinfo, which differs by CPU family.
_FEATURES_LINE = {"x86_64": "flags", "i686": "flags", "aarch64": "Features", "armv7l": "Features", "riscv64": "isa"}
_MODEL_LINES = ("model name", "Model", "Hardware", "uarch")

# Sums and means of larger readings could exceed the range of float64.
MAX_READING = 1e30

_AT_HWCAP, _AT_HWCAP2 = 16, 26
# Linux's names for the bits in AT_HWCAP and AT_HWCAP2 on aarch64, from bit 0 (arch/arm64/kernel/cpuinfo.c).
_HWCAP = """fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3
sm3 sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg""".split()
_HWCAP2 = """dcpodp sve2 sveaes svepmull svebitperm svesha3 svesm4 flagm2 frint svei8mm svef32mm svef64mm svebf16 i8mm
bf16 dgh rng bti""".split()


@dataclass(frozen=True)
class CpuInfo:
    """CPU description from Linux."""

    model: str = ""  # display name; "" if missing
    features: tuple[str, ...] = ()  # Linux's names for features that every core has
    parts: tuple[str, ...] = ()  # distinct Arm core types, ``IMPLEMENTER:PART`` as ``0x41:0xd03``, in core order


def parse_cpu_info(arch: str, cpuinfo: str, auxv: bytes = b"") -> CpuInfo:
    """Parse a machine's CPU description.

    An emulator may show the CPU of the machine that runs it. The feature line then has the name of a different CPU
    family. In this case, the description is ignored, and aarch64 features come from the auxiliary vector.

    Args:
        auxv: bytes from /proc/self/auxv, for any process on that machine.
    """
    cores = [dict(_iter_lines(block)) for block in cpuinfo.strip().split("\n\n")]
    line = _FEATURES_LINE.get(arch, "")
    shown = [
        core[line].replace("_", " ").split() if line == "isa" else core[line].split() for core in cores if line in core
    ]
    if not shown:
        return CpuInfo(features=tuple(_iter_hwcap_features(auxv)) if arch == "aarch64" else ())
    common = set.intersection(*map(set, shown))
    parts = [
        f"{core['CPU implementer']}:{core['CPU part']}"
        for core in cores
        if {"CPU implementer", "CPU part"} <= core.keys()
    ]
    return CpuInfo(
        model=next((core[key] for key in _MODEL_LINES for core in cores if core.get(key)), ""),
        features=tuple(feature for feature in dict.fromkeys(shown[0]) if feature in common),
        parts=tuple(dict.fromkeys(parts)),
    )


def _iter_lines(block: str) -> Iterator[tuple[str, str]]:
    for line in block.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            yield key.strip(), value.strip()


def _iter_hwcap_features(auxv: bytes) -> Iterator[str]:
    pairs = dict(struct.iter_unpack("<QQ", auxv[: len(auxv) // 16 * 16]))
    for names, bits in ((_HWCAP, pairs.get(_AT_HWCAP, 0)), (_HWCAP2, pairs.get(_AT_HWCAP2, 0))):
        for number, name in enumerate(names):
            if bits >> number & 1:
                yield name


# File name -> reading name, divisor and resulting unit. _TEXTS lists files with text values.
_NUMBERS: dict[str, tuple[str, float, str]] = {
    "scaling_cur_freq": ("{core} frequency", 1000, "MHz"),
    "scaling_max_freq": ("{core} highest frequency", 1000, "MHz"),
    "temp": ("{device} ({kind})", 1000, "degC"),
    "cur_state": ("{device} ({kind})", 1, ""),
    "meminfo": ("free memory", 1024, "MiB"),
}
_TEXTS = {"scaling_governor": "{core} governor", "get_throttled": "firmware throttling"}
_AVAILABLE = re.compile(r"^MemAvailable:\s*([0-9]{1,15}) kB", re.M)


def get_readings(files: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield readings that may change while a program runs, with the fields of a ``Reading``.

    - ``cpuN frequency``, ``cpuN highest frequency`` (highest allowed at present) and ``cpuN governor``, for the first
      core in each clock domain.
    - ``ZONE (TYPE)`` in degrees Celsius.
    - ``free memory``.
    - ``throttle events`` since boot.
    - ``firmware throttling`` (a Raspberry Pi's bits).
    - ``cooling_deviceN (TYPE)``: steps by which the CPU is slowed for cooling.

    Args:
        files: path -> content. A sensor also needs the ``type`` file in its directory.
    """
    throttled: list[float] = []
    for file, content in files.items():
        folder, name = posixpath.split(file)
        device, text = posixpath.basename(folder), content.strip()
        kind = files.get(f"{folder}/type", "").strip()
        words = {"core": device.replace("policy", "cpu"), "device": device, "kind": kind}
        if name == "cur_state" and not ("cpufreq" in kind or kind == "Processor"):
            continue
        if name in _TEXTS and text:
            yield {"name": _TEXTS[name].format(**words), "text": text}
        with contextlib.suppress(ValueError):  # empty, or a driver's "<unknown>"
            if name in _NUMBERS:
                title, divisor, unit = _NUMBERS[name]
                if name == "meminfo":
                    text = "".join(_AVAILABLE.findall(text))
                found = {"name": title.format(**words), "value": _parse_reading(text) / divisor, "unit": unit}
                yield {key: value for key, value in found.items() if value != ""}
            elif name.endswith("_throttle_count"):
                throttled.append(_parse_reading(text))
    if throttled:
        yield {"name": "throttle events", "value": sum(throttled)}


def _parse_reading(text: str) -> float:
    number = float(text)
    if not abs(number) <= MAX_READING:
        raise ValueError(f"{text} is not a measurement")
    return number

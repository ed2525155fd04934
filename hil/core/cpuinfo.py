"""What /proc/cpuinfo and the kernel's auxiliary vector say of a CPU; read on a board by its agent, or over a shell."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

# Architecture as uname -m says it -> the line of /proc/cpuinfo that holds its features; each family has one of its own.
_FEATURES_LINE = {"x86_64": "flags", "i686": "flags", "aarch64": "Features", "armv7l": "Features", "riscv64": "isa"}
_MODEL_LINES = ("model name", "Model", "Hardware", "uarch")

_AT_HWCAP, _AT_HWCAP2 = 16, 26
# Linux's names for the bits of AT_HWCAP and of AT_HWCAP2 on aarch64, from bit 0 (arch/arm64/kernel/cpuinfo.c).
_HWCAP = """fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3
sm3 sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg""".split()
_HWCAP2 = """dcpodp sve2 sveaes svepmull svebitperm svesha3 svesm4 flagm2 frint svei8mm svef32mm svef64mm svebf16 i8mm
bf16 dgh rng bti""".split()


@dataclass(frozen=True)
class CpuInfo:
    """A CPU, as far as it shows itself.

    Attributes:
        model: for people; "" where it has none.
        features: Linux's names of those that every core has.
        parts: kinds of Arm core, ``IMPLEMENTER:PART`` as ``0x41:0xd03``, in the order of the cores.
    """

    model: str = ""
    features: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


def cpu_info(arch: str, cpuinfo: str, auxv: bytes = b"") -> CpuInfo:
    """What a machine says of its CPU.

    An emulator may show the CPU of the machine it runs on. That is told by the features' line, which each family calls
    otherwise: then nothing of it holds, and the features of an aarch64 machine are those of its auxiliary vector.

    Args:
        auxv: the bytes of /proc/self/auxv, of any process of that machine.
    """
    cores = [dict(_lines(block)) for block in cpuinfo.strip().split("\n\n")]
    line = _FEATURES_LINE.get(arch, "")
    shown = [
        core[line].replace("_", " ").split() if line == "isa" else core[line].split() for core in cores if line in core
    ]
    if not shown:
        return CpuInfo(features=tuple(_hwcap_features(auxv)) if arch == "aarch64" else ())
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


def _lines(block: str) -> Iterator[tuple[str, str]]:
    for line in block.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            yield key.strip(), value.strip()


def _hwcap_features(auxv: bytes) -> Iterator[str]:
    pairs = dict(struct.iter_unpack("<QQ", auxv[: len(auxv) // 16 * 16]))
    for names, bits in ((_HWCAP, pairs.get(_AT_HWCAP, 0)), (_HWCAP2, pairs.get(_AT_HWCAP2, 0))):
        for number, name in enumerate(names):
            if bits >> number & 1:
                yield name

"""CPU details from /proc/cpuinfo of real boards (shortened), and of an emulator showing the host's file."""

from __future__ import annotations

import platform
import struct
import sys
from pathlib import Path

import pytest

from hil.core.cpuinfo import CpuInfo, get_readings, parse_cpu_info

X86 = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) N100
flags\t\t: fpu sse2 cx8 avx2
bugs\t\t:

processor\t: 1
vendor_id\t: GenuineIntel
model name\t: Intel(R) N100
flags\t\t: fpu sse2 cx8
"""
BIG_LITTLE = """processor\t: 0
Features\t: fp asimd evtstrm aes
CPU implementer\t: 0x41
CPU part\t: 0xd03

processor\t: 1
Features\t: fp asimd evtstrm aes
CPU implementer\t: 0x41
CPU part\t: 0xd03

processor\t: 4
Features\t: fp asimd evtstrm aes
CPU implementer\t: 0x41
CPU part\t: 0xd08

Hardware\t: RK3399
Model\t\t: Some Board
"""
RISCV = """processor\t: 0
hart\t\t: 0
isa\t\t: rv64imafdc_zicsr_zba_zbb
mmu\t\t: sv39
uarch\t\t: sifive,u74-mc
"""


def auxv(hwcap: int, hwcap2: int) -> bytes:
    return struct.pack("<8Q", 3, 0x400040, 16, hwcap, 26, hwcap2, 0, 0)


def test_cpu_info_intersects_features_of_cores():
    assert parse_cpu_info("x86_64", X86) == CpuInfo("Intel(R) N100", ("fpu", "sse2", "cx8"))


def test_cpu_info_lists_arm_core_types_in_order():
    info = parse_cpu_info("aarch64", BIG_LITTLE)
    assert info == CpuInfo("Some Board", ("fp", "asimd", "evtstrm", "aes"), ("0x41:0xd03", "0x41:0xd08"))


def test_cpu_info_splits_riscv_isa_into_extensions():
    assert parse_cpu_info("riscv64", RISCV) == CpuInfo("sifive,u74-mc", ("rv64imafdc", "zicsr", "zba", "zbb"))


def test_cpu_info_ignores_cpuinfo_of_emulator_host():
    assert parse_cpu_info("aarch64", X86) == CpuInfo()
    assert parse_cpu_info("x86_64", BIG_LITTLE, auxv(3, 0)) == CpuInfo()


def test_cpu_info_reads_aarch64_features_from_auxiliary_vector():
    info = parse_cpu_info("aarch64", X86, auxv(1 << 0 | 1 << 1 | 1 << 8 | 1 << 20, 1 << 13))
    assert info == CpuInfo(features=("fp", "asimd", "atomics", "asimddp", "i8mm"))


@pytest.mark.parametrize("text", ["", "\n\n", "no colon", "processor: 0\n\nprocessor: 1"])
@pytest.mark.parametrize("vector", [b"", b"odd"])
def test_cpu_info_handles_missing_fields(text, vector):
    assert parse_cpu_info("aarch64", text, vector) == CpuInfo()
    assert parse_cpu_info("pdp11", X86, vector) == CpuInfo()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_cpu_info_reads_this_machine():
    info = parse_cpu_info(platform.machine(), Path("/proc/cpuinfo").read_text(), Path("/proc/self/auxv").read_bytes())
    assert info.features


def test_readings_ignore_values_without_finite_sum():
    files = {f"/sys/cpu{core}/core_throttle_count": text for core, text in enumerate(("1.7e308", "1.7e308", "3"))}
    assert list(get_readings(files)) == [{"name": "throttle events", "value": 3.0}]

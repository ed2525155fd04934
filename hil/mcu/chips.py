"""Chips: memory, clock, UART and compile targets. A board config may override each value in its [mcu] table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Region:
    """Memory region: address and size in bytes."""

    start: int
    size: int


@dataclass(frozen=True)
class Core:
    """CPU core. ``triple``, ``cpu``, ``features`` and ``abi`` are LLVM's names, ``zig`` are arguments of `zig cc`."""

    name: str
    arch: str
    triple: str
    cpu: str
    features: str
    abi: str
    zig: tuple[str, ...]
    source: str  # file of the firmware with start, faults and ticks


@dataclass(frozen=True)
class Chip:
    """Chip with its board: everything that the firmware depends on."""

    name: str
    core: Core
    flash: Region
    ram: Region
    tick_hz: int  # frequency of the tick counter
    uart: str  # file of the firmware, or a file of the board config, with the UART
    defines: Mapping[str, int]  # addresses for the UART's and the core's file
    stack: int = 16 << 10


CORTEX_M55 = Core(
    "cortex-m55",
    arch="armv8.1-m",
    triple="thumbv8.1m.main-none-eabi",
    cpu="cortex-m55",
    features="+mve.fp,+fp-armv8d16sp",
    abi="",
    zig=("-target", "thumb-freestanding-eabihf", "-mcpu=cortex_m55"),
    source="cortex_m.c",
)
CORTEX_M4 = Core(
    "cortex-m4",
    arch="armv7e-m",
    triple="thumbv7em-none-eabi",
    cpu="cortex-m4",
    features="+vfp4d16sp",
    abi="",
    zig=("-target", "thumb-freestanding-eabihf", "-mcpu=cortex_m4"),
    source="cortex_m.c",
)
RISCV32 = Core(
    "riscv32",
    arch="riscv32",
    triple="riscv32-unknown-elf",
    cpu="generic-rv32",
    features="+m,+a,+f,+c",
    abi="ilp32f",
    zig=("-target", "riscv32-freestanding-none", "-mcpu=generic_rv32+m+a+f+c", "-mabi=ilp32f"),
    source="riscv.c",
)
CORES = MappingProxyType({one.name: one for one in (CORTEX_M55, CORTEX_M4, RISCV32)})

# Machines of QEMU. Sources: hw/arm/mps3r.c, mps2-tz.c, mps2.c and hw/riscv/virt.c of QEMU, and Arm's application notes
# AN547 and AN386.
_UART = {"HIL_UART": 0x59303000, "HIL_UART_HZ": 32_000_000}
_ALL = (
    Chip("mps3-an547", CORTEX_M55, Region(0, 512 << 10), Region(0x20000000, 512 << 10), 32_000_000, "uart_cmsdk.c", _UART),
    Chip(
        "mps2-an386",
        CORTEX_M4,
        Region(0, 4 << 20),
        Region(0x20000000, 4 << 20),
        25_000_000,
        "uart_cmsdk.c",
        {"HIL_UART": 0x40004000, "HIL_UART_HZ": 25_000_000},
    ),
    Chip(
        "riscv32-virt",
        RISCV32,
        Region(0x80000000, 4 << 20),
        Region(0x80400000, 4 << 20),
        10_000_000,
        "uart_16550.c",
        {
            "HIL_UART": 0x10000000,
            "HIL_UART_HZ": 3_686_400,
            "HIL_CLINT": 0x2000000,
            "HIL_RESET": 0x100000,
            "HIL_RESET_VALUE": 0x7777,
        },
    ),
)
CHIPS = MappingProxyType({one.name: one for one in _ALL})

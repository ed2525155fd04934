"""Chips and cores of microcontrollers: memory, clock, UART and compile targets.

A board config sets them in its [mcu] table. hil passes them to the compiler as flags ``--mcu-KEY=VALUE``, so that they
are part of a program's cache key and of the stored results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from hil.errors import UsageError, did_you_mean

FLAG = "--mcu-"
_UNITS = {"K": 1 << 10, "M": 1 << 20}
DEFAULT_STACK = 16 << 10
DEFAULT_BAUD = 921_600
_MIN_TICK_HZ = 1000  # the firmware counts periods of 10 ms
_MAX_IRQ = 239  # of Cortex-M3 and M4; the vector table's alignment is for this number
_MIN_BAUD, _MAX_BAUD = 300, 20_000_000


@dataclass(frozen=True)
class MemoryRegion:
    """Memory region: address and size in bytes."""

    start: int
    size: int

    def __str__(self) -> str:
        return f"{self.start:#x}:{self.size}"


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
    sources: tuple[str, ...]  # files of the firmware with start, faults and ticks


@dataclass(frozen=True)
class Chip:
    """Chip with its board: everything that the firmware depends on."""

    name: str
    core: Core
    flash: MemoryRegion
    ram: MemoryRegion
    tick_hz: int  # frequency of the tick counter
    uart: str  # file of the firmware with the UART, or the path of a user's file
    defines: Mapping[str, int] = field(default_factory=dict)  # macros for the files of the UART and the core
    stack: int = DEFAULT_STACK  # bytes
    baud: int = DEFAULT_BAUD
    uart_irq: int | None = None  # number of the UART's receive interrupt; None: the firmware polls the UART
    vectors: int | None = None  # address of the table that the CPU reads at reset, if it is not at the start of flash


CORTEX_M55 = Core(
    "cortex-m55",
    arch="armv8.1-m",
    triple="thumbv8.1m.main-none-eabi",
    cpu="cortex-m55",
    features="+mve.fp,+fp-armv8d16sp",
    abi="",
    zig=("-target", "thumb-freestanding-eabihf", "-mcpu=cortex_m55"),
    sources=("cortex_m.c", "arm_calls.c"),
)
CORTEX_M4 = Core(
    "cortex-m4",
    arch="armv7e-m",
    triple="thumbv7em-none-eabi",
    cpu="cortex-m4",
    features="+vfp4d16sp",
    abi="",
    zig=("-target", "thumb-freestanding-eabihf", "-mcpu=cortex_m4+vfp4d16sp"),
    sources=("cortex_m.c", "arm_calls.c"),
)
RISCV32 = Core(
    "riscv32",
    arch="riscv32",
    triple="riscv32-unknown-elf",
    cpu="generic-rv32",
    features="+m,+a,+f,+c",
    abi="ilp32f",
    zig=("-target", "riscv32-freestanding-none", "-mcpu=generic_rv32+m+a+f+c", "-mabi=ilp32f"),
    sources=("riscv.c",),
)
CORES: Mapping[str, Core] = MappingProxyType({one.name: one for one in (CORTEX_M55, CORTEX_M4, RISCV32)})

# Machines of QEMU. Sources: Arm's application notes AN547 and AN386, and QEMU's hw/arm/mps2-tz.c, hw/arm/mps2.c and
# hw/riscv/virt.c.
_ALL = (
    Chip(
        "mps3-an547",
        CORTEX_M55,
        # The ITCM at 0 and the DTCM have only 512 KiB. The CPU starts with the table at 0.
        flash=MemoryRegion(0x01000000, 2 << 20),
        ram=MemoryRegion(0x21000000, 4 << 20),
        vectors=0,
        tick_hz=32_000_000,
        uart="uart_cmsdk.c",
        defines={"HIL_UART": 0x59303000, "HIL_UART_HZ": 32_000_000},
        uart_irq=33,
    ),
    Chip(
        "mps2-an386",
        CORTEX_M4,
        flash=MemoryRegion(0, 4 << 20),
        ram=MemoryRegion(0x20000000, 4 << 20),
        tick_hz=25_000_000,
        uart="uart_cmsdk.c",
        defines={"HIL_UART": 0x40004000, "HIL_UART_HZ": 25_000_000},
        uart_irq=0,
    ),
    Chip(
        "riscv32-virt",
        RISCV32,
        flash=MemoryRegion(0x80000000, 4 << 20),
        ram=MemoryRegion(0x80400000, 4 << 20),
        tick_hz=10_000_000,
        uart="uart_16550.c",
        defines={
            "HIL_UART": 0x10000000,
            "HIL_UART_HZ": 3_686_400,
            "HIL_CLINT": 0x2000000,
            "HIL_PLIC": 0xC000000,
            "HIL_RESET": 0x100000,
            "HIL_RESET_VALUE": 0x7777,
        },
        uart_irq=10,
    ),
)
CHIPS: Mapping[str, Chip] = MappingProxyType({one.name: one for one in _ALL})


def parse_chip(values: Mapping[str, str]) -> Chip:
    """Return the chip for the keys of an [mcu] table, or of the compiler's flags.

    Args:
        values: ``chip`` is a known chip. The other keys override its values, or describe an unknown chip: ``core``,
            ``flash_memory`` and ``ram`` (ADDRESS:SIZE), ``tick_hz``, ``uart``, ``uart_irq``, ``stack``, ``baud``, and
            macros as ``define.NAME``.

    Raises:
        UsageError: a value is missing or invalid.
    """
    name = values.get("chip", "")
    known = CHIPS.get(name)
    if known is None:
        missing = [key for key in ("core", "flash_memory", "ram", "tick_hz", "uart") if key not in values]
        if missing:
            hint = f"{did_you_mean(name, CHIPS)}known chips: {', '.join(CHIPS)}; or set {', '.join(missing)}"
            raise UsageError(f"unknown chip {name!r}" if name else "the [mcu] table has no chip", hint=hint)
        known = Chip(
            name or values["core"],
            _find_core(values["core"]),
            _parse_region("flash_memory", values["flash_memory"]),
            _parse_region("ram", values["ram"]),
            _parse_number("tick_hz", values["tick_hz"]),
            values["uart"],
        )
    numbers: dict[str, Any] = {
        key: _parse_number(key, values[key]) for key in ("tick_hz", "stack", "baud", "uart_irq") if key in values
    }
    if "uart" in values or "define.HIL_UART" in values:
        # Another file may not enable the interrupt, and another UART has another number.
        numbers.setdefault("uart_irq", None)
    names = {"flash": "flash_memory", "ram": "ram"}
    regions: dict[str, Any] = {field: _parse_region(key, values[key]) for field, key in names.items() if key in values}
    defines = {key[7:]: _parse_number(key, value) for key, value in values.items() if key.startswith("define.")}
    chip = replace(
        known,
        core=_find_core(values["core"]) if "core" in values else known.core,
        uart=values.get("uart", known.uart),
        defines={**known.defines, **defines},
        **numbers,
        **regions,
    )
    if chip.tick_hz < _MIN_TICK_HZ or not _MIN_BAUD <= chip.baud <= _MAX_BAUD:
        raise UsageError(
            f"[mcu] tick_hz must be at least {_MIN_TICK_HZ}, and baud from {_MIN_BAUD} to {_MAX_BAUD}, "
            f"got {chip.tick_hz} and {chip.baud}"
        )
    if chip.uart_irq is not None:
        if chip.uart_irq > _MAX_IRQ:
            raise UsageError(f"[mcu] uart_irq must be from 0 to {_MAX_IRQ}, got {chip.uart_irq}")
        if chip.core is RISCV32 and "HIL_PLIC" not in chip.defines:
            raise UsageError(
                "[mcu] uart_irq on riscv32 needs the address of the interrupt controller (PLIC)",
                hint="set HIL_PLIC in [mcu.defines], or remove uart_irq",
            )
    if chip.stack % 8 or not 1024 <= chip.stack < chip.ram.size:
        raise UsageError(
            f"the stack of {chip.stack} bytes must be a multiple of 8, at least 1024, and fit into the RAM"
        )
    return chip


def format_flags(values: Mapping[str, str]) -> tuple[str, ...]:
    """Return compiler flags for the keys of an [mcu] table."""
    return tuple(f"{FLAG}{key}={value}" for key, value in values.items())


def split_flags(flags: Iterable[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the keys of ``--mcu-KEY=VALUE`` flags, and the other flags."""
    values: dict[str, str] = {}
    others: list[str] = []
    for flag in flags:
        key, _, value = flag.removeprefix(FLAG).partition("=")
        if flag.startswith(FLAG):
            values[key] = value
        else:
            others.append(flag)
    return values, tuple(others)


def choose_target_flags(core: Core, others: Sequence[str]) -> tuple[str, ...]:
    """Return the flags of iree-compile for a core. Flags of the user take precedence, because they are last."""
    made = [
        "--iree-hal-target-device=local",
        "--iree-hal-local-target-device-backends=llvm-cpu",
        f"--iree-llvmcpu-target-triple={core.triple}",
        f"--iree-llvmcpu-target-cpu={core.cpu}",
        f"--iree-llvmcpu-target-cpu-features={core.features}",
        *([f"--iree-llvmcpu-target-abi={core.abi}"] if core.abi else []),
        "--iree-llvmcpu-link-embedded=false",
        "--iree-llvmcpu-link-static",
        # Without these the code contains uninitialized data, which differs between builds (IREE 3.13).
        "--iree-llvmcpu-debug-symbols=false",
    ]
    given = {flag.partition("=")[0] for flag in others}
    return (*(flag for flag in made if flag.partition("=")[0] not in given), *others)


def _find_core(name: str) -> Core:
    if name not in CORES:
        raise UsageError(f"unknown core {name!r}", hint=f"{did_you_mean(name, CORES)}known cores: {', '.join(CORES)}")
    return CORES[name]


def _parse_number(key: str, text: str) -> int:
    try:
        number = int(text[:-1], 0) * _UNITS[text[-1]] if text[-1:] in _UNITS else int(text, 0)
    except ValueError as error:
        raise UsageError(
            f"[mcu] {key} must be a number, got {text!r}", hint="examples: 16000000, 0x4000, 512K"
        ) from error
    if not 0 <= number < 1 << 32:
        raise UsageError(f"[mcu] {key} must be from 0 to 4294967295, got {text!r}")
    return number


def _parse_region(key: str, text: str) -> MemoryRegion:
    start, separator, size = text.partition(":")
    if not separator:
        raise UsageError(f"[mcu] {key} must be ADDRESS:SIZE, got {text!r}", hint="example: 0x20000000:128K")
    region = MemoryRegion(_parse_number(key, start), _parse_number(key, size))
    if not region.size or region.start + region.size > 1 << 32:
        raise UsageError(f"[mcu] {key} must be a range of at most 4 GiB, got {text!r}")
    return region

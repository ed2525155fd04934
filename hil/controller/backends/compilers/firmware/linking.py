"""Link firmware with Zig's C compiler, which contains everything that the build needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hil.controller.models.compiling import run_logged
from hil.controller.storage.sources.packages import find_package_folder
from hil.core.chips import Chip
from hil.core.files import read_file
from hil.core.scratch import remove_tree
from hil.errors import CompileFailed, UsageError
from hil.formats.elf32 import Elf32
from hil.formats.firmware import Symbol

PACKAGE, EXTRA = "ziglang", "mcu"
SOURCES = Path(__file__).with_name("sources")
_COMMON = ("main.c", "frames.c", "program.c", "libc.c")
_MAX_ELF = 64 << 20
# A section that does not fit: `section '.bss' will not fit in region 'RAM': overflowed by 1234 bytes`.
_OVERFLOW = re.compile(r"will not fit in region '(?P<region>\w+)': overflowed by (?P<bytes>\d+) bytes")
_ERROR = re.compile(r"(?:error|ld\.lld): (?:error: )?(?P<what>.*)")
_SHOWN = 3


def list_sources(chip: Chip) -> list[Path]:
    """Return the C files of a chip's firmware, without the model's. Raises UsageError if the UART's file is missing."""
    uart = next((one for one in (SOURCES / chip.uart, Path(chip.uart)) if one.is_file()), None)
    if uart is None:
        raise UsageError(f"[mcu] uart: C file {chip.uart!r} not found", hint="specify a path relative to the config")
    return [*(SOURCES / name for name in (*_COMMON, *chip.core.sources)), uart]


def link_firmware(chip: Chip, objects: Sequence[Path], script: Path, out: Path, zig_cache: Path, log: Path) -> None:
    """Compile hil's C files and link them with a program.

    Args:
        objects: C files and object files of the program.
        script: linker script.
        out: the ELF file.
        zig_cache: directory for Zig's compiled libraries, shared by all builds.

    Raises:
        UsageError: Zig is not installed.
        CompileFailed: the build failed, or the program does not fit into the chip's memory.
    """
    macros = {**chip.defines, "HIL_TICK_HZ": chip.tick_hz, "HIL_BAUD": chip.baud, "HIL_RAM": chip.ram.start}
    if chip.uart_irq is not None:
        macros["HIL_UART_IRQ"] = chip.uart_irq
    command = [
        str(find_package_folder(PACKAGE, EXTRA) / "zig"),
        "cc",
        *chip.core.zig,
        *("-std=c11", "-O2", "-g", "-ffreestanding", "-fno-builtin", "-ffunction-sections", "-fdata-sections"),
        *("-fno-unwind-tables", "-fno-asynchronous-unwind-tables", "-fno-sanitize=all"),
        *(f"-D{name}={value}u" for name, value in macros.items()),
        f"-I{SOURCES}",
        *map(str, [*list_sources(chip), *objects]),
        *(f"-Wl,-T,{script}", "-Wl,--gc-sections", "-Wl,-e,hil_vectors"),
        *("-o", str(out)),
    ]
    places = {"ZIG_GLOBAL_CACHE_DIR": str(zig_cache), "ZIG_LOCAL_CACHE_DIR": str(out.parent / "zig-local")}
    try:
        code, printed = run_logged(command, log, script.parent, places)
    finally:
        remove_tree(out.parent / "zig-local")
    if not code:
        return
    found = _OVERFLOW.findall(printed)
    if found:
        missing = {region: max(int(size) for name, size in found if name == region) for region, _ in found}
        needs = " and ".join(
            f"{size} bytes more {'flash' if name == 'FLASH' else name}" for name, size in missing.items()
        )
        raise CompileFailed(
            f"the program does not fit into {chip.name}: it needs {needs}",
            hint=f"the chip has {chip.flash.size} bytes of flash and {chip.ram.size} bytes of RAM",
        )
    errors = list(dict.fromkeys(match["what"][:300] for match in _ERROR.finditer(printed)))
    raise CompileFailed(
        "the firmware does not compile: " + ("; ".join(errors[:_SHOWN]) or f"exit code {code}"),
        detail="\n".join(printed.splitlines()[:60]),
    )


def read_elf(path: Path) -> Elf32:
    """Read a linked firmware."""
    return Elf32(read_file(path, _MAX_ELF))


def list_symbols(elf: Elf32) -> list[Symbol]:
    """Return the functions, and hil's own names of addresses."""
    return [
        Symbol(address, size, name)
        for name, address, size, is_function in elf.iter_symbols()
        if is_function and not name.startswith("$")
    ]


def find_address(elf: Elf32, name: str) -> int:
    """Return the address of a symbol. Raises CompileFailed if the symbol does not exist."""
    for found, address, _, _ in elf.iter_symbols():
        if found == name:
            return address
    raise CompileFailed(f"the firmware has no symbol {name}")

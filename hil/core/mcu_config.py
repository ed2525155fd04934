"""Parse the table ``[mcu]`` of a board config, for boards without an operating system.

A known chip needs only its name and a flash command::

    [mcu]
    chip = "mps3-an547"
    flash = ["openocd", "-f", "board.cfg", "-c", "program {elf} verify reset exit"]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hil.core.chips import DEFAULT_BAUD, DEFAULT_STACK, parse_chip
from hil.core.config_keys import make_key
from hil.core.config_values import make_values, parse_program, parse_timeout
from hil.errors import UsageError

# Runtime and compiler of boards with this table.
MCU_RUNTIME = "mcu"
_CHIP_KEYS = ("chip", "core", "flash_memory", "ram", "tick_hz", "uart", "uart_irq", "stack", "baud")


@dataclass(frozen=True)
class Microcontroller:
    """Chip, serial speed and commands."""

    chip: str = make_key(
        "", "Name of the [chip](microcontrollers.md#describe-a-real-board). The next keys override its values."
    )
    core: str = make_key("", "CPU core: `cortex-m4`, `cortex-m55` or `riscv32`.", unset="of the chip")
    flash_memory: str = make_key("", "Flash memory as `ADDRESS:SIZE`: `0x08000000:1M`.", unset="of the chip")
    ram: str = make_key("", "RAM as `ADDRESS:SIZE`. The stack is at its start.", unset="of the chip")
    tick_hz: str = make_key("", "Frequency of the tick counter: the CPU's clock on Cortex-M.", unset="of the chip")
    uart: str = make_key(
        "", "C file with the UART's functions: one of hil's, or a path relative to the config.", unset="of the chip"
    )
    uart_irq: str = make_key(
        "",
        "Number of the UART's receive interrupt, if the file `uart` enables it. Without it, bytes that arrive during a "
        "run are lost.",
        unset="of the chip",
    )
    stack: str = make_key("", "Size of the stack in bytes.", unset=f"{DEFAULT_STACK:,}")
    baud: str = make_key("", "Speed of the serial line.", unset=f"{DEFAULT_BAUD:,}")
    defines: Mapping[str, str] = make_key(dict, "Macros for the C files, such as addresses of registers.")
    flash: tuple[str, ...] = make_key(
        (), "Command that writes the firmware. `{elf}` and `{bin}` are the paths of the ELF file and of the image."
    )
    reset: tuple[str, ...] = make_key((), "Command that restarts the board, if the firmware does not respond.")
    boot_s: float = make_key(10.0, "Maximum time from flashing until the firmware responds, in seconds.")
    watchdog_s: float = make_key(60.0, "Maximum time of a run, measured by the board, in seconds.")

    @property
    def values(self) -> dict[str, str]:
        """Return the keys of the chip, as for :func:`hil.core.chips.parse_chip`."""
        found = {name: value for name in _CHIP_KEYS if (value := getattr(self, name))}
        return found | {f"define.{name}": value for name, value in self.defines.items()}


def parse_mcu(table: Mapping[str, Any], path: Path) -> Microcontroller:
    """Parse the table.

    Args:
        path: the config file. Relative paths of ``uart`` and of programs start at its directory.

    Raises:
        UsageError: a key is unknown, or a value is invalid.
    """
    where = f"{path}: [mcu]"
    values = dict(table)
    # Numbers may be TOML numbers, or text with a unit.
    for key in _CHIP_KEYS:
        if type(values.get(key)) is int:
            values[key] = str(values[key])
    if isinstance(defines := values.get("defines"), dict):
        values["defines"] = {name: str(one) if type(one) is int else one for name, one in defines.items()}
    for key in ("flash", "reset"):
        if key in values:
            values[key] = parse_program(values[key], f"{where} {key}", path)
    made: Microcontroller = make_values(Microcontroller, values, where)
    if made.uart and (own := path.parent / made.uart).is_file():
        made = replace(made, uart=str(own.resolve()))
    try:
        parse_chip(made.values)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", hint=error.hint) from error
    seconds: dict[str, Any] = {
        name: parse_timeout(getattr(made, name), f"{where} {name}") for name in ("boot_s", "watchdog_s")
    }
    return replace(made, **seconds)

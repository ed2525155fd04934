"""Chips of board configs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.core.board_parser import parse_board
from hil.core.chips import CHIPS, MemoryRegion, format_flags, parse_chip, split_flags
from hil.errors import UsageError

OWN = {
    "core": "cortex-m4",
    "flash_memory": "0x08000000:1M",
    "ram": "0x20000000:192K",
    "tick_hz": "168000000",
    "uart": "usart.c",
}


def test_a_known_chip_needs_only_its_name() -> None:
    assert parse_chip({"chip": "mps2-an386"}) == CHIPS["mps2-an386"]


def test_a_config_may_override_values_of_a_known_chip() -> None:
    chip = parse_chip(
        {"chip": "mps2-an386", "ram": "0x20000000:64K", "baud": "115200", "define.HIL_UART": "0x40005000"}
    )
    assert chip.ram == MemoryRegion(0x20000000, 64 << 10)
    assert chip.baud == 115_200
    assert chip.defines["HIL_UART"] == 0x40005000
    assert chip.flash == CHIPS["mps2-an386"].flash


@pytest.mark.parametrize(
    ("values", "number"),
    [
        ({}, 0),
        ({"uart": "own.c"}, None),
        ({"uart": "own.c", "uart_irq": "5"}, 5),
        ({"define.HIL_UART": "0x40005000"}, None),
        ({"define.HIL_UART": "0x40005000", "uart_irq": "2"}, 2),
        ({"define.HIL_UART_HZ": "12500000"}, 0),
    ],
)
def test_another_uart_has_no_interrupt_by_default(values: dict[str, str], number: int | None) -> None:
    assert parse_chip({"chip": "mps2-an386", **values}).uart_irq == number


def test_an_unknown_chip_is_described_completely() -> None:
    chip = parse_chip({"chip": "stm32f407", **OWN})
    assert (chip.name, chip.core.name, chip.flash) == ("stm32f407", "cortex-m4", MemoryRegion(0x08000000, 1 << 20))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"chip": "mps2-an385"}, "unknown chip 'mps2-an385'"),
        ({**OWN, "core": "cortex-m3"}, "unknown core 'cortex-m3'"),
        ({**OWN, "ram": "128K"}, "[mcu] ram must be ADDRESS:SIZE, got '128K'"),
        ({**OWN, "ram": "0x20000000:0"}, "[mcu] ram must be a range of at most 4 GiB, got '0x20000000:0'"),
        ({**OWN, "tick_hz": "fast"}, "[mcu] tick_hz must be a number, got 'fast'"),
        (
            {**OWN, "tick_hz": "0"},
            "[mcu] tick_hz must be at least 1000, and baud from 300 to 20000000, got 0 and 921600",
        ),
        ({**OWN, "baud": "4294967295"}, "[mcu] tick_hz must be at least 1000"),
        ({**OWN, "baud": "0"}, "[mcu] tick_hz must be at least 1000"),
        ({**OWN, "uart_irq": "240"}, "[mcu] uart_irq must be from 0 to 239, got 240"),
        ({**OWN, "core": "riscv32", "uart_irq": "1"}, "[mcu] uart_irq on riscv32 needs the address of the interrupt"),
        ({**OWN, "stack": "300K"}, "the stack of 307200 bytes must be a multiple of 8"),
    ],
)
def test_an_invalid_chip_is_an_error(values: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_chip(values)
    assert caught.value.message.startswith(message)


def test_the_compiler_gets_the_chip_as_flags() -> None:
    values = {"chip": "mps2-an386", "define.HIL_UART": "0x40005000"}
    flags = (*format_flags(values), "--iree-opt-level=O2")
    assert split_flags(flags) == (values, ("--iree-opt-level=O2",))


CONFIG = """
[connection]
address = "serial:/dev/ttyACM0"
[mcu]
chip = "mps3-an547"
baud = 115200
flash = "openocd -c 'program {elf}'"
watchdog_s = 5.0
"""


def test_a_board_config_names_the_chip_and_the_flash_command(tmp_path: Path) -> None:
    config = parse_board(CONFIG, tmp_path / "m55.toml")
    assert config.runtime == "mcu"
    assert config.mcu is not None
    assert config.mcu.flash == ("openocd", "-c", "program {elf}")
    assert config.compile_flags["mcu"] == ("--mcu-chip=mps3-an547", "--mcu-baud=115200")
    assert "[mcu] flash" in config.asks


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("chip = 5", "unknown chip '5'"),
        ("chip = 'mps3-an547'\nwatchdog_s = 0.0", "[mcu] watchdog_s must be a number of seconds above 0"),
        ("chip = 'mps3-an547'\nflush = 'x'", "[mcu]: unknown key 'flush'"),
        ("chip = 'mps3-an547'\ndefines = 3", "[mcu] defines must be a table"),
        ("chip = 'mps3-an547'\nboot_s = 'slow'", "[mcu] boot_s"),
    ],
)
def test_an_invalid_table_is_an_error(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_board(f"[mcu]\n{line}\n", tmp_path / "m.toml")
    assert message in caught.value.message

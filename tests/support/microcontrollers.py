"""Emulated microcontrollers for tests, one per chip and session. A pytest plugin for all tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from hil.errors import UsageError
from tools.virtual_board.microcontroller import MicrocontrollerBoard, find_machine, start_microcontroller

Microcontrollers = Callable[[str], MicrocontrollerBoard]
CHIPS = ("cortex-m55", "cortex-m4", "riscv32")
# One chip in each run of the tests, the others only in thorough ones.
EACH_CHIP = [
    pytest.param("cortex-m4", id="cortex-m4"),
    *(pytest.param(name, id=name, marks=pytest.mark.slow) for name in ("cortex-m55", "riscv32")),
]


def require_emulator(chip: str) -> None:
    """Skip the test if QEMU, the C compiler or pyserial is not installed."""
    try:
        find_machine(chip)
    except UsageError as error:
        pytest.skip(f"{error.message}: {error.hint}")
    for package in ("ziglang", "serial"):
        if find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed: pip install 'hil[mcu]'")


@pytest.fixture(scope="session")
def start_chip() -> Iterator[Microcontrollers]:
    """Return the board with a chip. Tests share it: leave it on, connected, and its line without faults."""
    boards: dict[str, MicrocontrollerBoard] = {}
    with ExitStack() as stack:

        def start(chip: str) -> MicrocontrollerBoard:
            require_emulator(chip)
            if chip not in boards:
                folder = Path(tempfile.mkdtemp(prefix="hil-mcu-")) / chip
                stack.callback(shutil.rmtree, folder.parent, ignore_errors=True)
                boards[chip] = start_microcontroller(folder, chip)
                stack.callback(boards[chip].down)
            return boards[chip]

        yield start

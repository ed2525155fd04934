"""Profiles of firmware from the ticks of its steps."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hil.core.tensors import TensorSpec
from hil.errors import BoardUnfit
from hil.formats.firmware import Firmware, FirmwareStep
from hil.formats.operations import read_operations
from hil.mcu.messages import OK, TICKS, BoardRunResult
from hil.mcu.runtime import FirmwareProgram, _run_command
from hil.mcu.settings import ChipSettings

SPEC = TensorSpec("y", "float32", (1,))
HZ = 100_000_000


class Client:
    """Client of a board whose steps take the given ticks."""

    def __init__(self, ticks: list[int]) -> None:
        self._ticks = ticks

    def run(self, inputs_crc: int, timeout_s: float) -> BoardRunResult:
        return BoardRunResult(OK, 0, 0x2144DF1C, 0, sum(self._ticks))  # CRC-32 of four zero bytes

    def read(self, area: int, length: int) -> bytes:
        data = struct.pack(f"<{len(self._ticks)}I", *self._ticks) if area == TICKS else bytes(4)
        assert len(data) == length
        return data


@pytest.mark.parametrize("ticks", [[], [2, 3], [(1 << 32) - 1] * 3])
def test_profile_has_duration_of_each_step(tmp_path: Path, ticks: list[int]) -> None:
    steps = tuple(FirmwareStep(f"step{number}", "dispatch") for number in range(len(ticks)))
    firmware = Firmware("mps2-an386", "00", 0, HZ, 0, 0, (), (SPEC,), steps, ())
    settings = ChipSettings.of(
        {"address": "", "chip": {"chip": "mps2-an386"}, "flash": (), "reset": (), "boot_s": 1.0, "watchdog_s": 1.0}
    )
    client: Any = Client(ticks)
    checked: list[Any] = []
    (path,) = FirmwareProgram(client, firmware, settings).profile(0, 1, tmp_path, None, checked.append)
    found = read_operations(path)
    assert [one.end_ns - one.start_ns for one in found] == [number * 10 for number in ticks]
    assert np.array_equal(checked[0], [np.zeros(1, np.float32)])


@pytest.mark.parametrize(
    ("script", "message", "detail"),
    [
        ("echo no probe; exit 1", "no probe", ""),
        ("exit 3", "exit code 3", ""),
        ("echo start; echo no probe; exit 1", "no probe", "start\nno probe"),
    ],
)
def test_failed_command_shows_each_line_once(script: str, message: str, detail: str) -> None:
    with pytest.raises(BoardUnfit) as failed:
        _run_command(("sh", "-c", script), "flashing the firmware")
    assert failed.value.message == f"flashing the firmware failed: {message}"
    assert failed.value.detail == detail

"""The check of a board's power meter."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hil.controller.devices.board import Board
from hil.controller.devices.health import PASS, SKIP, WARN
from hil.controller.workloads.meter_check import check_meter
from hil.core.board_config import BoardConfig, Connection
from hil.core.meter_config import MeterConfig
from hil.errors import BoardBusy

CONSTANT = "import time\nprint('watts', flush=True)\nwhile True: print(3.5, flush=True); time.sleep(0.01)"


def check(meter: MeterConfig, **more: Any) -> tuple[str, str, str]:
    config = BoardConfig("pi", "rpi5", meter=meter, **more)
    (found,) = check_meter(cast(Board, SimpleNamespace(name="pi", config=config, meter=meter, take=refuse)))
    assert found.name == "meter"
    return found.state, found.found, found.fix


def refuse() -> None:
    raise BoardBusy("the board is in use by ana")


def test_meter_reports_its_power():
    state, found, _ = check(MeterConfig(kind="command", command=(sys.executable, "-c", CONSTANT), start_s=60.0))
    assert (state, found) == (PASS, "command: 3.5 W")


def test_meter_that_ends_is_warning():
    state, found, fix = check(MeterConfig(kind="command", command=(sys.executable, "-c", "exit(3)"), start_s=60.0))
    assert (state, "ended with exit code 3" in found, "[meter]" in fix) == (WARN, True, True)


def test_missing_sensor_is_warning(tmp_path: Path):
    state, found, _ = check(MeterConfig(kind="hwmon", path=str(tmp_path), where="host"))
    assert (state, "has no power sensor for channel 1" in found) == (WARN, True)


def test_sensor_of_busy_board_is_skipped():
    state, found, fix = check(MeterConfig(kind="hwmon", path="/sys/h"))
    assert (state, found, fix) == (
        SKIP,
        "hwmon on the board: the board is in use by ana",
        "retry when the board is free",
    )


def test_meter_of_leased_board_is_named():
    state, found, fix = check(MeterConfig(), connection=Connection(host_meter="command"))
    assert (state, found) == (SKIP, "command: only jobs can use this meter")
    assert "hil farm submit MODEL --board pi --energy" in fix


def test_board_without_meter_has_no_check():
    with pytest.raises(ValueError, match="not enough values"):
        check(MeterConfig())

"""Energy from a sensor of the board, which the agent samples on the board's clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.agents import start_process, stop_process
from support.power_sensors import FakeSensor, check_energy_of_sensor
from support.waiting import eventually

from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.choosing.board_factory import connect_board
from hil.controller.devices.metering.board_meter import BoardMeter
from hil.controller.pipeline.energy import measure_energy
from hil.core.board_config import BoardConfig, Connection
from hil.core.meter_config import MeterConfig

RATE_HZ = 100.0
# The board's clock is far from this machine's, and runs too fast.
CLOCK = "clock:offset=5000,ppm=300"


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[[MeterConfig], Board]]:
    """Yield a function that connects to a simulator with a skewed clock, as to a board at an address."""
    boards: list[Board] = []
    process, address = start_process("hil.sim", f"unix:{tmp_path}/s.sock", tmp_path / "store", "--fault", CLOCK)

    def make(meter: MeterConfig) -> Board:
        config = BoardConfig("metered", "sim", connection=Connection(address=address), meter=meter)
        boards.append(connect_board(BoardChoice(config, purpose="a test")))
        boards[-1].take()
        return boards[-1]

    yield make
    for board in boards:
        board.close()
    stop_process(process)


def test_energy_from_the_sensor_of_a_board(connect, tmp_path):
    sensor = FakeSensor(tmp_path)
    board = connect(MeterConfig(kind="hwmon", path=str(tmp_path), rate_hz=RATE_HZ, idle_s=0.6))
    check_energy_of_sensor(board, sensor)


@pytest.mark.ci
def test_counter_of_a_board_wraps_around(connect, tmp_path):
    sensor = FakeSensor(tmp_path)
    sensor.replace("max_energy_range_uj", 999_999)
    sensor.replace("energy_uj", 800_000)
    meter = BoardMeter(connect(MeterConfig(kind="rapl", path=str(tmp_path), rate_hz=RATE_HZ)))
    meter.start()
    try:
        eventually(lambda: meter.read().joules.size, "the first sample arrived")
        for value, total in ((900_000, 0.1), (100_000, 0.3), (500_000, 0.7), (950_000, 1.15)):
            sensor.replace("energy_uj", value)
            eventually(lambda total=total: meter.read().joules[-1:] >= total - 1e-6, lambda: meter.read().problem)
    finally:
        meter.stop()
    found = meter.read()
    assert (found.clock, found.problem) == ("board", "")
    assert found.joules.tolist() == pytest.approx([0.0, 0.1, 0.3, 0.7, 1.15])


def test_missing_sensor_of_a_board_is_refused(connect, tmp_path):
    board = connect(MeterConfig(kind="hwmon", path=str(tmp_path), channel=4))
    found = measure_energy(board, lambda *_: pytest.fail("ran"), each_ns=1e6, timeout_s=1.0, report=lambda share: None)
    assert found.refused == "meter failed"
    assert "has no power sensor for channel 4" in found.reason
    assert "sensor" in found.reason.partition("; ")[2]

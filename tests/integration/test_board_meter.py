"""Energy from a sensor of the board, which the agent samples on the board's clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.agents import start_process, stop_process

from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.choosing.board_factory import connect_board
from hil.controller.devices.metering import energy
from hil.controller.pipeline.energy import EnergyCall, measure_energy
from hil.core.board_config import BoardConfig, Connection
from hil.core.clock import get_time_ns
from hil.core.meter_config import MeterConfig

IDLE_W, ACTIVE_W = 2.0, 5.0
RATE_HZ = 100.0
# The board's clock is far from this machine's, and runs too fast.
CLOCK = "clock:offset=5000,ppm=300"


class FakeSensor:
    """Fake sysfs directory with a known power."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.watts = IDLE_W

    def set_power(self, watts: float) -> None:
        self.watts = watts
        self.replace("power1_input", round(watts * 1e6))

    def replace(self, name: str, value: int) -> None:
        fresh = self.folder / f"new-{name}"
        fresh.write_text(f"{value}\n")
        fresh.replace(self.folder / name)


class FakeCounter(FakeSensor):
    """Energy counter that a thread updates, and that starts again from 0 after 6 J."""

    LARGEST = 5_999_999

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.replace("max_energy_range_uj", self.LARGEST)
        self.replace("energy_uj", 0)
        self._total = 0.0
        self._at = time.monotonic()
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._count)
        self._thread.start()

    def set_power(self, watts: float) -> None:
        self._update()
        self.watts = watts

    def stop(self) -> None:
        self._leaving.set()
        self._thread.join()

    def _count(self) -> None:
        while not self._leaving.wait(0.004):
            self._update()

    def _update(self) -> None:
        with self._lock:
            now = time.monotonic()
            self._total += self.watts * (now - self._at) * 1e6
            self._at = now
            self.replace("energy_uj", round(self._total) % (self.LARGEST + 1))


@pytest.fixture(autouse=True)
def accept_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept pauses of a busy machine. The power is constant during a window, so they do not matter."""
    monkeypatch.setattr(energy, "MAX_GAP", 0.9)


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


def measure(board: Board, sensor: FakeSensor, accuracy: float) -> tuple[float, float]:
    """Return the measured energy of an inference, and the true one. An inference takes a millisecond."""
    true_s: list[float] = []

    def run(iterations: int, warmup: int) -> EnergyCall:
        begun = get_time_ns()
        sensor.set_power(ACTIVE_W)
        time.sleep(warmup / 1000)
        start = get_time_ns()
        time.sleep(iterations / 1000)
        end = get_time_ns()
        sensor.set_power(IDLE_W)
        true_s.append((end - start) / 1e9 / iterations)
        board.ping()
        fit = board.clock_fit(begun)
        assert fit is not None
        return EnergyCall((fit.to_board(start), fit.to_board(end)), (begun, get_time_ns()), iterations)

    found = measure_energy(board, run, each_ns=1e6, timeout_s=60.0, report=lambda share: None)
    assert found.refused is None, found.reason
    assert found.per_inference is not None
    assert found.idle_w == pytest.approx(IDLE_W, rel=accuracy)
    assert found.peak_w is not None and found.peak_w >= 0.95 * ACTIVE_W
    return found.per_inference.joules, (ACTIVE_W - IDLE_W) * sum(true_s) / len(true_s)


def test_energy_from_the_sensor_of_a_board(connect, tmp_path):
    sensor = FakeSensor(tmp_path)
    sensor.set_power(IDLE_W)
    board = connect(MeterConfig(kind="hwmon", path=str(tmp_path), rate_hz=RATE_HZ, idle_s=0.6))
    measured, true = measure(board, sensor, 0.02)
    assert measured == pytest.approx(true, rel=0.02)


@pytest.mark.ci
def test_energy_from_the_counter_of_a_board(connect, tmp_path):
    sensor = FakeCounter(tmp_path)
    try:
        board = connect(MeterConfig(kind="rapl", path=str(tmp_path), rate_hz=RATE_HZ, idle_s=0.6, where="board"))
        # The thread of the counter may be late. A missed wrap-around is an error of 6 J.
        measured, true = measure(board, sensor, 0.1)
    finally:
        sensor.stop()
    assert measured == pytest.approx(true, rel=0.1)


def test_missing_sensor_of_a_board_is_refused(connect, tmp_path):
    board = connect(MeterConfig(kind="hwmon", path=str(tmp_path), channel=4))
    found = measure_energy(board, lambda *_: pytest.fail("ran"), each_ns=1e6, timeout_s=1.0, report=lambda share: None)
    assert found.refused == "meter failed"
    assert "has no power sensor for channel 4" in found.reason
    assert "sensor" in found.reason.partition("; ")[2]

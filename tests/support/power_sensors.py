"""Fake power sensors in a directory like sysfs, and a measurement with a known energy."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hil.controller.devices.board import Board
from hil.controller.devices.metering import energy
from hil.controller.pipeline.energy import EnergyCall, measure_energy
from hil.core.clock import get_time_ns

IDLE_W, ACTIVE_W = 2.0, 5.0


class FakeSensor:
    """Fake sysfs directory with a known power."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.set_power(IDLE_W)

    def set_power(self, watts: float) -> None:
        self.replace("power1_input", round(watts * 1e6))

    def replace(self, name: str, value: int) -> None:
        fresh = self.folder / f"new-{name}"
        fresh.write_text(f"{value}\n")
        fresh.replace(self.folder / name)


def check_energy_of_sensor(board: Board, sensor: FakeSensor) -> None:
    """Compare the measured energy of an inference with the true one. An inference takes a millisecond."""
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

    with pytest.MonkeyPatch.context() as patch:
        # The power is constant during a window, so pauses of a busy machine do not matter.
        patch.setattr(energy, "MAX_GAP", 0.9)
        patch.setattr(energy, "MIN_SAMPLES", 5)
        found = measure_energy(board, run, each_ns=1e6, timeout_s=60.0, report=lambda share: None)
    assert found.refused is None, found.reason
    assert found.per_inference is not None
    assert found.idle_w == pytest.approx(IDLE_W, rel=0.02)
    assert found.peak_w is not None and found.peak_w >= 0.95 * ACTIVE_W
    true = (ACTIVE_W - IDLE_W) * sum(true_s) / len(true_s)
    assert found.per_inference.joules == pytest.approx(true, rel=0.02)

"""Windows of an energy measurement, and meters that do not start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from hil.controller.devices.board import Board
from hil.controller.pipeline.energy import EnergyCall, measure_energy, run_first_window
from hil.core.board_config import BoardConfig
from hil.core.meter_config import MeterConfig

MS = 1_000_000


class FakeProgram:
    """Program whose iterations take a known time."""

    def __init__(self, each_ns: int) -> None:
        self.each_ns = each_ns
        self.calls = 0

    def run(self, iterations: int, warmup: int) -> EnergyCall:
        self.calls += 1
        times = (0, iterations * self.each_ns)
        return EnergyCall(times, times, iterations)


@pytest.mark.parametrize(("period_ns", "expected_ns"), [(MS, 200 * MS), (10 * MS, 500 * MS)])
@pytest.mark.parametrize("cold_ns", [20_000, 1 * MS, 3000 * MS])
def test_cold_time_does_not_shorten_the_windows(cold_ns, period_ns, expected_ns):
    program = FakeProgram(20_000)
    call, warmup = run_first_window(program.run, each_ns=cold_ns, period_ns=period_ns, timeout_s=60.0)
    assert expected_ns <= call.board_ns[1] <= 1.3 * expected_ns
    assert warmup == round(0.1 * call.iterations)
    assert program.calls <= 4


def test_exact_time_needs_one_call():
    program = FakeProgram(MS)
    assert run_first_window(program.run, each_ns=MS, period_ns=MS, timeout_s=60.0)[0].iterations == 200
    assert program.calls == 1


@pytest.mark.parametrize("kind", ["hwmon", "rapl", "file", "command"])
def test_missing_meter_is_a_refused_energy(kind):
    meter = MeterConfig(kind=kind, path="/no/such/sensor", where="host", command=("hil-no-such-meter",))
    board = cast(Board, SimpleNamespace(meter=meter, config=BoardConfig("b", "sim", meter=meter), name="b"))
    found = measure_energy(board, FakeProgram(MS).run, each_ns=1.0, timeout_s=1.0, report=lambda share: None)
    assert found.refused == "meter failed"
    assert found.reason

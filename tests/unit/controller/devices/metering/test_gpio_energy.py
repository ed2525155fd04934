"""Windows of a GPIO in a stream of CSV lines, whose clock differs from this machine's clock."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hil.controller.devices.metering import energy
from hil.controller.devices.metering.csv_samples import CsvParser
from hil.controller.devices.metering.energy import evaluate_energy, select_gpio_windows
from hil.controller.devices.metering.sample_buffer import SampleBuffer
from hil.controller.pipeline.energy import EnergyCall, measure_energy
from hil.controller.records.measurements.energy import EnergyMeasurement
from hil.core.board_config import BoardConfig
from hil.core.clock import get_time_ns
from hil.core.meter_config import MeterConfig

S = 1_000_000_000
MS = S // 1000
IDLE_W, ACTIVE_W = 2.0, 5.0
RATE_HZ = 500
CALLS, ITERATIONS, WARMUP, RUN_NS = 10, 8, 1, 60 * MS
BEGIN = 10**15


class Recording:
    """Lines of a meter: a pulse for each run, or for each call, and their arrival."""

    def __init__(self, *, each_run: bool, offset_s: float, drift: float, latency_ns: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        now = BEGIN + 2 * S
        self.idle = [(BEGIN + S // 2, now - S // 2)]
        self.calls: list[tuple[int, int]] = []
        pulses: list[tuple[int, int]] = []
        for _ in range(CALLS):
            begun = now
            runs = []
            for _ in range(WARMUP + ITERATIONS):
                now += int(random.integers(8, 12)) * MS
                runs.append((now, now + RUN_NS))
                now += RUN_NS
            pulses += runs if each_run else [(runs[0][0], runs[-1][1])]
            now += 5 * MS
            self.calls.append((begun, now))
            now += int(random.integers(50, 100)) * MS
        self.idle.append((now, now + S))
        times = np.arange(BEGIN, now + S + S // 2, S // RATE_HZ)
        high = np.zeros(times.size, np.bool_)
        for start, end in pulses:
            high |= (times >= start) & (times < end)
        watts = np.where(high, ACTIVE_W, IDLE_W) + random.normal(0, 0.1, times.size)
        self.pulses = pulses
        buffer = SampleBuffer("meter")
        parser = CsvParser(("time", "watts", "gpio"), buffer)
        for at, power, level in zip(times.tolist(), watts.tolist(), high.tolist(), strict=True):
            meter_s = offset_s + (at - BEGIN) / S * (1 + drift)
            arrived = at + latency_ns + int(random.exponential(2 * MS))
            parser.feed(f"{meter_s:.6f},{power:.4f},{int(level)}", arrived)
        self.samples = buffer.read(has_time=True, problem="")

    def evaluate(self) -> EnergyMeasurement:
        windows = select_gpio_windows(self.samples, self.calls, ITERATIONS, WARMUP)
        return evaluate_energy(self.samples, windows, (self.idle[0], self.idle[1]), meter="file")


@pytest.mark.parametrize("each_run", [True, False])
@pytest.mark.parametrize(("offset_s", "drift"), [(0.0, 0.0), (-7000.0, 3e-4), (1.7e9, -5e-4)])
@pytest.mark.parametrize("latency_ns", [MS, 30 * MS])
def test_gpio_energy_error_is_below_two_percent(each_run, offset_s, drift, latency_ns):
    recording = Recording(each_run=each_run, offset_s=offset_s, drift=drift, latency_ns=latency_ns, seed=1)
    found = recording.evaluate()
    assert found.refused is None, found.reason
    true_s = sum(end - start for start, end in recording.pulses) / S / (CALLS * (ITERATIONS + WARMUP))
    assert found.per_inference is not None
    assert found.per_inference.joules == pytest.approx((ACTIVE_W - IDLE_W) * true_s, rel=0.02)
    assert found.inferences == CALLS * (ITERATIONS if each_run else ITERATIONS + WARMUP)


def test_gpio_of_another_program_is_refused():
    recording = Recording(each_run=True, offset_s=0.0, drift=0.0, latency_ns=MS, seed=2)
    with pytest.raises(Exception, match="the gpio was high 9 times in a call, expected 1 or 5"):
        select_gpio_windows(recording.samples, recording.calls, 4, 1)


# Prints a high power while a file contains 1, on a clock that is far from this machine's clock and too fast. Writes the
# length of each pulse in seconds to another file.
STREAM = """
import sys, time
begin = time.monotonic()
number = 0
rose = None
pulses = open(sys.argv[2], "w")
while True:
    number += 1
    time.sleep(max(begin + number / 200 - time.monotonic(), 0))
    high = open(sys.argv[1]).read() == "1"
    now = time.monotonic()
    if high and rose is None:
        rose = now
    elif not high and rose is not None:
        print(now - rose, file=pulses, flush=True)
        rose = None
    at = 5000 + (now - begin) * 1.0005
    print(f"{at:.6f},{5.0 if high else 2.0},{int(high)}", flush=True)
"""


@pytest.mark.ci
def test_gpio_of_a_command_selects_the_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(energy, "MAX_GAP", 0.9)
    pin, log = tmp_path / "pin", tmp_path / "pulses"

    def set_pin(level: int) -> None:
        fresh = tmp_path / "fresh"
        fresh.write_text(str(level))
        fresh.rename(pin)

    set_pin(0)
    (tmp_path / "stream.py").write_text(STREAM)
    command = (sys.executable, "-S", str(tmp_path / "stream.py"), str(pin), str(log))
    columns = ("time", "watts", "gpio")
    meter = MeterConfig(kind="command", command=command, columns=columns, windows="gpio", idle_s=0.5)
    config = BoardConfig("sim", "sim")
    board = SimpleNamespace(meter=meter, config=config, ping=lambda: None, clock_fit=lambda since_ns=None: None)
    units: list[int] = []

    def run(iterations: int, warmup: int) -> EnergyCall:
        begun = get_time_ns()
        time.sleep(0.02)
        set_pin(1)
        time.sleep((iterations + warmup) / 100)
        set_pin(0)
        time.sleep(0.02)
        units.append(iterations + warmup)
        return EnergyCall((0, 0), (begun, get_time_ns()), iterations)

    found = measure_energy(board, run, each_ns=10 * MS, timeout_s=60.0, report=lambda share: None)
    assert found.refused is None, found.reason
    seconds = [float(line) for line in log.read_text().split()]
    assert (len(seconds), found.inferences) == (len(units), sum(units))
    assert found.per_inference is not None
    assert found.per_inference.joules == pytest.approx((ACTIVE_W - IDLE_W) * sum(seconds) / sum(units), rel=0.03)

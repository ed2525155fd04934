"""Simulated meter with a known power: idle, and active while a program runs."""

from __future__ import annotations

import numpy as np

from hil.controller.devices.metering.samples import MAX_SAMPLES, Floats, Nanoseconds, PowerSamples
from hil.core.clock import get_time_ns
from hil.core.meter_config import SimulatedPower


class SimulatedMeter:
    """Meter that computes its samples from the times in which the board ran a program.

    Args:
        rate_hz: samples a second. The distances vary by a tenth, like those of a real meter.
    """

    def __init__(self, power: SimulatedPower, rate_hz: float) -> None:
        self._power = power
        self._period_ns = 1e9 / rate_hz
        self._runs: list[tuple[int, int]] = []
        self._prompts: list[tuple[int, int]] = []
        self._start_ns = self._stop_ns = 0

    def start(self) -> None:
        """Start to sample."""
        self._start_ns = get_time_ns()

    def stop(self) -> None:
        """Stop to sample."""
        self._stop_ns = get_time_ns()

    def observe_run(self, start_ns: int, end_ns: int) -> None:
        """Draw the active power between two host times: a program ran."""
        self._runs.append((start_ns, end_ns))

    def observe_prompt(self, start_ns: int, end_ns: int) -> None:
        """Draw the power of a prompt between two host times of a run."""
        self._prompts.append((start_ns, end_ns))

    def read(self) -> PowerSamples:
        """Return the samples so far. Every call returns the same values for the same times."""
        end_ns = self._stop_ns or get_time_ns()
        count = min(int((end_ns - self._start_ns) / self._period_ns), MAX_SAMPLES)
        random = np.random.default_rng(int(self._power.seed))
        noise = random.standard_normal((max(count, 1), 3))
        jitter = np.clip(noise[:, 0], -3, 3) / 30
        times = self._start_ns + np.round((np.arange(max(count, 1)) + 0.5 + jitter) * self._period_ns).astype(np.int64)
        watts = self.compute_watts(times) + self._power.noise_w * noise[:, 1]
        kept = random.random(max(count, 1)) >= self._power.lost
        kept[count:] = False
        return PowerSamples(times[kept], watts[kept], lost=count - int(kept.sum()))

    def compute_watts(self, times_ns: Nanoseconds) -> Floats:
        """Return the true power at host times."""
        power = self._power
        above_w = np.zeros(times_ns.size)
        for parts, active_w in ((self._runs, power.active_w), (self._prompts, power.prompt_w or power.active_w)):
            for start, end in parts:
                above_w[(times_ns >= start) & (times_ns < end)] = active_w - power.idle_w
        elapsed_s = (times_ns - self._start_ns).astype(np.float64) / 1e9
        watts: Floats = power.idle_w + power.drift_w * elapsed_s + above_w
        return watts

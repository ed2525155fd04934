"""Meter that reads a power sensor (hwmon) or an energy counter (RAPL, powercap) of this machine's kernel."""

from __future__ import annotations

import threading
from array import array

import numpy as np

from hil.controller.devices.metering.samples import MAX_SAMPLES, PowerSamples, make_sensor_samples
from hil.core.clock import get_time_ns
from hil.core.meter_config import MeterConfig
from hil.core.power_sensor import PowerSensor, open_sensor

_END_SECONDS = 1.0


class SysfsMeter:
    """Meter that reads files of the kernel at a fixed rate in a thread."""

    def __init__(self, config: MeterConfig) -> None:
        self._config = config
        self._sensor: PowerSensor | None = None
        self._times_ns = array("q")
        self._values = array("d")
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None
        self._problem = ""

    def start(self) -> None:
        """Open the sensor, and start to sample. Raises UsageError if the sensor is missing or unreadable."""
        self._sensor = open_sensor(self._config.kind, self._config.path, self._config.channel)
        self._thread = threading.Thread(target=self._collect, args=[self._sensor], daemon=True, name="hil-meter")
        self._thread.start()

    def stop(self) -> None:
        """Stop to sample."""
        self._leaving.set()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def read(self) -> PowerSamples:
        """Return the samples so far."""
        with self._lock:
            times, values = np.array(self._times_ns, np.int64), np.array(self._values, np.float64)
        counts_energy = self._sensor is not None and self._sensor.counts_energy
        return make_sensor_samples(times, values, counts_energy=counts_energy, problem=self._problem)

    def _collect(self, sensor: PowerSensor) -> None:
        period_ns = round(1e9 / self._config.rate_hz)
        due = get_time_ns()
        while not self._leaving.wait(max(due - get_time_ns(), 0) / 1e9) and len(self._values) < MAX_SAMPLES:
            before = get_time_ns()
            try:
                value = sensor.read_value()
            except (OSError, ValueError) as error:
                self._problem = f"reading the meter failed: {getattr(error, 'strerror', None) or error}"
                return
            # The kernel took the value between the two times.
            at = (before + get_time_ns()) // 2
            with self._lock:
                if not self._times_ns or at > self._times_ns[-1]:
                    self._times_ns.append(at)
                    self._values.append(value)
            # After a pause of this process, continue from now instead of sampling in a burst.
            due = max(due + period_ns, get_time_ns())

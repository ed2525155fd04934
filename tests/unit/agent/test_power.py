"""The agent samples a power sensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from support.waiting import eventually

from hil.agent import power
from hil.agent.power import PowerSampler, stream_power
from hil.errors import BoardUnfit, UsageError
from hil.protocol.v1 import agent_pb2 as pb


class CountingSensor:
    """Sensor whose values are 1, 2, 3 and so on."""

    counts_energy = False

    def __init__(self, values: Iterator[float] | None = None) -> None:
        self.values = itertools.count(1.0) if values is None else values

    def read_value(self) -> float:
        value = next(self.values, None)
        if value is None:
            raise OSError(19, "No such device")
        return value


@pytest.mark.parametrize("rate_hz", [0.0, 1e-12, 1e9, math.nan, math.inf, -1.0])
def test_rate_out_of_range_is_refused(rate_hz):
    request = pb.PowerRequest(kind="hwmon", path="/sys/none", rate_hz=rate_hz)
    with pytest.raises(UsageError, match=r"from 0\.1 to 10000 Hz"):
        next(stream_power(request, lambda: True))


def test_samples_before_a_failure_are_delivered():
    with PowerSampler(CountingSensor(iter([1.0, 2.0])), 1000.0) as sampler:
        sampler._thread.join()
        found = sampler.take()
        assert (list(found.values), found.lost) == ([1.0, 2.0], 0)
        assert found.clock_ns[0] < found.clock_ns[1]
        with pytest.raises(BoardUnfit, match="reading the sensor failed: No such device"):
            sampler.take()


def test_samples_of_a_slow_client_are_lost(monkeypatch):
    monkeypatch.setattr(power, "MAX_WAITING_SAMPLES", 5)
    with PowerSampler(CountingSensor(), 5000.0) as sampler:
        eventually(lambda: sampler._lost >= 3, "samples are lost")
        found = sampler.take()
    assert list(found.values) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert found.lost >= 3

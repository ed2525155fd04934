"""Readings of an agent must be small enough for sums and means."""

from __future__ import annotations

import json
import math

import pytest

from hil.controller.devices.agent_client.answers import check_sample
from hil.controller.devices.measuring.conditions import summarise_conditions
from hil.controller.devices.measuring.grading import grade_measurement
from hil.core.cpuinfo import MAX_READING
from hil.core.timeline import Sample
from hil.errors import ProtocolBroken
from hil.protocol.v1 import agent_pb2 as pb

COUNTERS = ("cpu0 busy", "cpu1 busy", "cpu0 frequency", "memory pressure")


def sample(value: float) -> pb.CounterSample:
    return pb.CounterSample(readings=[pb.Reading(name=name, value=value) for name in COUNTERS])


@pytest.mark.parametrize("value", [math.nan, math.inf, 1.7e308, -1.7e308])
def test_readings_without_finite_sum_are_rejected(value: float) -> None:
    with pytest.raises(ProtocolBroken, match="the reading 'cpu0 busy' is"):
        check_sample(sample(value))


@pytest.mark.parametrize("value", [MAX_READING, -MAX_READING])
def test_conditions_of_extreme_readings_are_finite(value: float) -> None:
    check_sample(sample(value))
    samples = [Sample(at, name, value, "MHz") for at in range(4) for name in COUNTERS]
    states = [{"readings": [{"name": "soc", "unit": "degC", "value": one}]} for one in (-value, value)]
    found = summarise_conditions(*states, samples, [], own_cores=1.0)
    assert found.busy_cores is not None and math.isfinite(found.busy_cores)
    json.dumps([found.to_json(), grade_measurement(found, None).to_json()], allow_nan=False)

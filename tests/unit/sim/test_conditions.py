"""Conditions of simulated devices."""

from __future__ import annotations

import itertools
import time

import pytest

from hil.protocol.v1 import agent_pb2 as pb
from hil.sim.conditions import SimConditions
from hil.sim.faults import parse


def read(conditions: SimConditions, *readings: pb.Reading) -> dict[str, float]:
    return {one.name: one.value for one in conditions.change_readings(list(readings))}


def test_throttle_slows_runs_and_changes_readings_of_agent(tmp_path, monkeypatch):
    worker, agent = (SimConditions([parse("throttle:after=1,lasts=2,factor=3")], tmp_path) for _ in range(2))
    now = time.time()
    assert read(agent)["thermal_zone0 (simulated)"] == 45
    assert worker.compute_next_factor() == 1
    start = (tmp_path / "throttle.first-run").stat().st_mtime
    assert start >= now - 1
    shown = []
    for elapsed in (0.5, 1.5, 3.5, 13):
        monkeypatch.setattr(time, "time", lambda elapsed=elapsed: start + elapsed)
        found = read(agent)
        names = ("cpu0 highest frequency", "thermal_zone0 (simulated)", "throttle events")
        shown.append((worker.compute_next_factor(), *(round(found[name]) for name in names)))
    assert shown == [(1, 1800, 60, 0), (3, 600, 85, 1), (1, 1800, 69, 1), (1, 1800, 45, 1)]


@pytest.mark.parametrize(("cores", "shown"), [(1.5, [100, 70]), (1, [100, 20]), (0.5, [60, 20])])
def test_load_adds_to_busy_cores(tmp_path, cores, shown):
    conditions = SimConditions([parse(f"load:cores={cores}")], tmp_path)
    busy = [pb.Reading(name="cpu0 busy", value=10), pb.Reading(name="cpu1 busy", value=20)]
    assert list(read(conditions, *busy).values()) == shown
    factors = [conditions.compute_next_factor() for _ in range(200)]
    assert 60 < factors.count(1.5) < 140 and set(factors) == {1, 1.5}


def test_noise_extends_runs_at_random_and_repeatably(tmp_path):
    first, second = (SimConditions([parse("noise:share=0.1,seed=3")], tmp_path) for _ in range(2))
    factors = [first.compute_next_factor() for _ in range(500)]
    assert factors == [second.compute_next_factor() for _ in range(500)]
    assert min(factors) >= 1
    assert 0.06 < sum(factors) / len(factors) - 1 < 0.1
    assert len(set(itertools.islice(factors, 10))) == 10
    assert not first.are_simulated

"""Waiting for a steady board."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hil.controller.devices.measuring.settling import find_unsteady, settle_board
from hil.core.timeline import Sample

PERIOD_NS = 250_000_000
ZONE = "thermal_zone0 (cpu)"
Value = Callable[[float], float]


def make_samples(
    duration_s: float, zone: Value = lambda _: 50.0, clock: Value = lambda _: 1800.0, **others: float
) -> list[Sample]:
    """Return counters from 0 to ``duration_s``; ``zone`` and ``clock`` are functions of the time in seconds."""
    found = []
    for at in range(0, int(duration_s * 1e9) + 1, PERIOD_NS):
        values = [(ZONE, zone(at / 1e9), "degC"), ("cpu0 frequency", clock(at / 1e9), "MHz")]
        values += [(name.replace("_", " "), value, "%") for name, value in others.items()]
        found += [Sample(at, *value) for value in values]
    return found


@pytest.mark.parametrize(
    ("samples", "unsteady"),
    [
        ([], "less than 5 s"),
        (make_samples(4), "less than 5 s"),
        (make_samples(5), ""),
        (make_samples(20, zone=lambda s: 50 + s % 2), ""),  # a sensor between two values
        (make_samples(20, zone=lambda s: 80 - s), "thermal_zone0 (cpu) falls: 61.1 C"),
        (make_samples(20, zone=lambda s: 80 - min(s, 14)), ""),
        (make_samples(20, clock=lambda s: 1800 if s > 17 else 900), "cpu0 frequency changed from 1064 to 1800 MHz"),
        (make_samples(20, cpu0_busy=40, cpu1_busy=40), "0.8 cores busy"),
        (make_samples(20, cpu0_busy=20, cpu1_busy=10), ""),
        (make_samples(20, memory_pressure=5), "stall on memory for 5 %"),
    ],
)  # fmt: skip
def test_find_unsteady_names_changing_counters(samples, unsteady):
    found = find_unsteady(samples)
    assert len(found) == bool(unsteady)
    assert unsteady in "".join(found)


class FakeCounters:
    """A board's counters, and a clock that advances when hil sleeps."""

    def __init__(self, zone: Value, problem: str = "") -> None:
        self.now, self.zone, self.problem = 0.0, zone, problem

    @property
    def samples(self) -> list[Sample]:
        return make_samples(self.now, self.zone)

    @contextlib.contextmanager
    def watch_counters(self, period_s: float) -> Iterator[Any]:
        yield self

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("zone", "problem", "waited", "steady"),
    [
        (lambda _: 50.0, "", (4.7, 5.1), True),
        (lambda s: 80 - min(s, 8), "", (10, 13), True),
        (lambda s: 80 - s, "", (30, 30), False),
        (lambda s: 80 - s, "no agent", (0, 0), False),
    ],
)
def test_settle_board_waits_until_steady_or_limit(monkeypatch, zone, problem, waited, steady):
    board: Any = FakeCounters(zone, problem)
    monkeypatch.setattr(
        "hil.controller.devices.measuring.settling.time",
        SimpleNamespace(monotonic=lambda: board.now, sleep=board.sleep),
    )
    found = settle_board(board, 30.0)
    assert waited[0] <= found.waited_s <= waited[1]
    assert (found.steady, bool(found.unsteady)) == (steady, not steady)

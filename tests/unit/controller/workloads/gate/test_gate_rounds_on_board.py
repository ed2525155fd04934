"""Rounds of a gate on a board that changes while they are measured."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake_boards import FakeBoard, fake_case

from hil.controller.analysis.bench.measure import BenchSide
from hil.controller.analysis.bench.stats import Batch
from hil.controller.analysis.detection.sequential import SequentialDecision
from hil.controller.pipeline.settings.options import Job
from hil.controller.workloads.gate import remeasure
from hil.controller.workloads.gate.remeasure import Remeasurer
from hil.errors import BoardError

SCREEN: Any = SimpleNamespace(stage=lambda *args: None, note=lambda text: None)


def measure(monkeypatch: pytest.MonkeyPatch, events: Sequence[str], known: Sequence[float]) -> tuple[Any, list[float]]:
    """Measure ten rounds without a difference on a board with these events; return the decision and what is kept."""
    board: Any = FakeBoard("a", None)
    sides = [BenchSide(label, fake_case(label.lower()), board) for label in "AB"]

    def measure_rounds(*_: Any) -> Iterator[int]:
        board.changes += events
        for number in range(10):
            for side in sides:
                side.batches.append(Batch(side.label, number, 0, np.arange(5), np.full(5, 1000 + number % 2)))
            yield number + 1

    monkeypatch.setattr(remeasure, "measure_rounds", measure_rounds)
    kept: list[float] = []
    decision = SequentialDecision(0.02)
    for log_ratio in known:
        decision.add(log_ratio)
    unused: Any = None
    again = Remeasurer(unused, unused, unused, Job(()), 0.02, SCREEN, unused, unused)
    try:
        again.measure_turns("m", sides, decision, until=time.monotonic() + 60, keep_round=kept.append)
    except BoardError as error:
        return (error, decision), kept
    return (None, decision), kept


def test_rounds_on_steady_board_are_kept(monkeypatch):
    (error, decision), kept = measure(monkeypatch, [], [0.001])
    assert error is None
    assert decision.log_ratios == [0.001, *kept]
    assert len(kept) > 1


def test_rounds_on_throttled_board_are_discarded(monkeypatch):
    (error, decision), kept = measure(monkeypatch, ["the board throttled: 1 CPU throttle events"], [0.001])
    assert "not comparable: the board throttled" in error.message
    assert math.isnan(kept[-1])
    assert decision.log_ratios == []

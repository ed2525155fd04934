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
from hil.controller.records.instructions import InstructionComparison
from hil.controller.workloads.gate import remeasure
from hil.controller.workloads.gate.judge import Remeasurement
from hil.controller.workloads.gate.programs import ProgramRestorer
from hil.controller.workloads.gate.remeasure import Remeasurer
from hil.errors import BoardError, HilError, RunFailed

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
    again = Remeasurer(ProgramRestorer(unused, Job(()), unused), unused, unused, 0.02, SCREEN, unused)
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


def count(monkeypatch: pytest.MonkeyPatch, suspect: Any, found: InstructionComparison | HilError) -> Remeasurement:
    """Count the instructions of two programs again, for a case with this suspect."""

    def count_again(cases: Any, board: Any) -> InstructionComparison:
        if isinstance(found, HilError):
            raise found
        return found

    monkeypatch.setattr(remeasure, "count_again", count_again)
    unused: Any = None
    again, board = Remeasurement(), unused
    sides = [BenchSide(label, fake_case(label.lower()), board) for label in "AB"]
    case: Any = SimpleNamespace(new=SimpleNamespace(case="m"), suspect=suspect)
    Remeasurer(unused, unused, unused, 0.02, SCREEN, unused)._count(case, again, sides)
    return again


def test_board_without_counter_prevents_only_the_comparison_of_counts(monkeypatch):
    error = RunFailed("instructions not counted: no counter")
    assert count(monkeypatch, "a suspect time", error).instructions is None
    with pytest.raises(RunFailed, match="no counter"):
        count(monkeypatch, None, error)


def test_board_error_ends_the_comparison_of_counts(monkeypatch):
    with pytest.raises(BoardError):
        count(monkeypatch, "a suspect time", BoardError("gone"))


def test_new_counts_are_kept(monkeypatch):
    found = InstructionComparison(ratio=1.1, min_effect=0.001, verdict="more")
    assert count(monkeypatch, None, found).instructions == found

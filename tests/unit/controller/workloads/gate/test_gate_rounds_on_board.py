"""Rounds of a gate on a board that changes while they are measured."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake_boards import FakeBoard, fake_case, fake_choice

from hil.controller.analysis.bench.measure import BenchSide
from hil.controller.analysis.bench.stats import Batch
from hil.controller.analysis.detection.sequential import SequentialDecision
from hil.controller.pipeline.settings.options import Job
from hil.controller.records.measurements.instructions import InstructionComparison
from hil.controller.workloads.gate import remeasure
from hil.controller.workloads.gate.judge import Remeasurement
from hil.controller.workloads.gate.programs import ProgramRestorer
from hil.controller.workloads.gate.remeasure import Remeasurer
from hil.core.results import Outcome
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


def make_sides(icount_shift: int = -1) -> list[BenchSide]:
    board: Any = FakeBoard("a", replace(fake_choice().config, icount_shift=icount_shift))
    return [BenchSide(label, fake_case(label.lower()), board) for label in "AB"]


def suspect_of(direction: str) -> Any:
    return SimpleNamespace(direction=direction)


def count(
    monkeypatch: pytest.MonkeyPatch, suspect: Any, found: InstructionComparison | HilError, icount_shift: int = -1
) -> Remeasurement:
    """Count the instructions of two programs again, for a case with this suspect."""

    def count_again(cases: Any, board: Any) -> InstructionComparison:
        if isinstance(found, HilError):
            raise found
        return found

    monkeypatch.setattr(remeasure, "count_again", count_again)
    unused: Any = None
    again, sides = Remeasurement(), make_sides(icount_shift)
    case: Any = SimpleNamespace(new=SimpleNamespace(case="m"), suspect=suspect)
    Remeasurer(unused, unused, unused, 0.02, SCREEN, unused)._count(case, again, sides)
    return again


def test_board_without_counter_prevents_only_the_comparison_of_counts(monkeypatch):
    error = RunFailed("instructions not counted: no counter")
    assert count(monkeypatch, suspect_of("slower"), error).instructions is None
    with pytest.raises(RunFailed, match="no counter"):
        count(monkeypatch, None, error)


def test_emulated_board_must_count_again(monkeypatch):
    error = RunFailed("instructions not counted: no counter")
    with pytest.raises(RunFailed, match="no counter"):
        count(monkeypatch, suspect_of("fixed"), error, icount_shift=0)
    assert count(monkeypatch, suspect_of("broken"), error, icount_shift=0).instructions is None


def test_times_of_emulated_board_are_not_measured():
    unused: Any = None
    again = Remeasurement()
    case: Any = SimpleNamespace(suspect=suspect_of("fixed"))
    measurer = Remeasurer(unused, unused, unused, 0.02, SCREEN, unused)
    measurer._measure_times(case, again, make_sides(icount_shift=0), 0.0, (), unused)
    assert (again.decision, again.new_p50_ns) == (None, None)


@pytest.mark.parametrize(("stored", "is_other"), [("a", False), ("b", True)])
def test_measurement_on_another_board_is_marked(monkeypatch, stored: str, is_other: bool):
    entry = SimpleNamespace(case="m", run="r", key=SimpleNamespace(board=stored, runtime="onnxruntime"))
    entry.source = SimpleNamespace(commit="1a2b3c4d")
    case: Any = SimpleNamespace(old=entry, new=entry, suspect=suspect_of("slower"), instructions=None)
    pool: Any = SimpleNamespace(session=lambda *args, **how: SimpleNamespace(board=make_sides()[0].board))
    restorer: Any = SimpleNamespace(
        opener=SimpleNamespace(open=lambda entry: None),
        choose_job=lambda cases: Job((), hw_type="sim"),
        restore_entry=lambda *args: fake_case("m"),
    )
    monkeypatch.setattr(Remeasurer, "run_once", lambda self, case, session: replace(case, outcome=Outcome.PASS))
    monkeypatch.setattr(Remeasurer, "_measure_times", lambda *args: None)
    screen: Any = SimpleNamespace(**vars(SCREEN), begin=lambda *args: None, end=lambda *args: None)
    unused: Any = None
    again = Remeasurer(restorer, unused, pool, 0.02, screen, unused).measure(
        case, budget_s=1.0, known=(), keep_round=unused
    )
    assert (again.error, again.is_other_board) == ("", is_other)


@pytest.mark.parametrize(
    ("job", "name"), [(Job(()), "lab"), (Job((), board="other"), "other"), (Job((), hw_type="sim"), "sim")]
)
def test_noise_is_that_of_the_measuring_board(monkeypatch, job: Job, name: str):
    unused: Any = None
    case: Any = SimpleNamespace(
        suspect=suspect_of("slower"), new=SimpleNamespace(case="m", key=SimpleNamespace(board="lab"))
    )
    boards: list[str] = []
    measurer = Remeasurer(
        ProgramRestorer(unused, job, unused), unused, unused, 0.02, SCREEN, lambda board: boards.append(board) or ()
    )
    monkeypatch.setattr(Remeasurer, "measure_turns", lambda *args, **how: None)
    measurer._measure_times(case, Remeasurement(), make_sides(), 0.0, (), unused)
    assert boards == [name]


def test_board_error_ends_the_comparison_of_counts(monkeypatch):
    with pytest.raises(BoardError):
        count(monkeypatch, suspect_of("slower"), BoardError("gone"))


def test_new_counts_are_kept(monkeypatch):
    found = InstructionComparison(ratio=1.1, min_effect=0.001, verdict="more")
    assert count(monkeypatch, None, found).instructions == found

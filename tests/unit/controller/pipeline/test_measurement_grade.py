"""Conditions and grades of a case's run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_boards import FakeBoard, fake_case, fake_choice

from hil.controller.pipeline.case import Case
from hil.controller.pipeline.measurement_grade import grade_run, is_measured, watch_run
from hil.controller.records.measurements.conditions import Conditions
from hil.core.results import RunResult

MS = 1_000_000


class Watch:
    """Conditions of a quiet board, or of a board with events. Stores the arguments of the summary."""

    def __init__(self, *events: str) -> None:
        self.events = list(events)
        self.asked: tuple[Any, ...] = ()

    def summarise(self, window_ns: tuple[int, int] | None, own_cores: float | None) -> Conditions:
        self.asked = window_ns, own_cores
        return Conditions(readings=[], events=self.events)


def graded(watch: Watch, count: int, *, cold: bool = False, is_on_board: bool = True, **changes: Any) -> Case:
    stamps = tuple((10 * MS * number, 10 * MS * number + MS) for number in range(1, count + 1))
    options = {name: changes.pop(name) for name in ("fresh_load", "repeat") if name in changes}
    result = RunResult("board", {}, stamps, cold=cold)
    board_ns = (0, 20 * MS * count) if is_on_board else None
    call: Any = SimpleNamespace(iterations_ns=stamps, board_ns=board_ns, cpu_ns=2 * MS * count)
    return grade_run(replace(fake_case("a", **options), result=result, **changes), watch, call)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "cold", "grade"), [(40, True, "A"), (10, True, "B"), (10, False, "B"), (9, True, "F"), (9, False, "F")]
)
def test_grade_counts_cold_iteration(count, cold, grade):
    found = graded(Watch(), count, cold=cold).grade
    assert found is not None and found.grade == grade


def test_grade_includes_events_on_board():
    found = graded(Watch("the board throttled"), 40).grade
    assert found is not None and (found.grade, found.reasons) == ("F", ["the board throttled"])


def test_conditions_cover_iterations_and_own_load():
    watch = Watch()
    graded(watch, 20)
    assert watch.asked == ((10 * MS, 201 * MS), 2.0)
    graded(watch, 20, is_on_board=False)
    assert watch.asked == (None, 2.0)
    graded(watch, 20, fresh_load=True, repeat=2)
    assert watch.asked == ((10 * MS, 201 * MS), None)


@pytest.mark.parametrize(("decoder", "count", "grade"), [(None, 0, None), (object(), 1, "F"), (object(), 0, "F")])
def test_single_generation_is_graded_by_conditions(decoder, count, grade):
    case = graded(Watch("the board throttled"), count, decoder=decoder)
    assert case.conditions is not None and (case.grade and case.grade.grade) == grade
    assert case.grade is None or case.grade.reasons == ["the board throttled"]


def test_single_iteration_is_not_measured():
    assert not is_measured(fake_case("a"))
    assert is_measured(fake_case("a", iterations=2)) and is_measured(fake_case("a", repeat=2))
    assert is_measured(replace(fake_case("a"), decoder=object()))  # type: ignore[arg-type]


@pytest.mark.parametrize(("icount_shift", "is_watched"), [(-1, True), (0, False)])
def test_emulated_board_without_times_is_not_graded(icount_shift, is_watched):
    board: Any = FakeBoard("a", replace(fake_choice().config, icount_shift=icount_shift))
    case = replace(fake_case("a"), decoder=object())  # type: ignore[arg-type]
    with watch_run(case, board) as watch:
        assert (watch is not None) == is_watched

"""What the engine does with cases whose boards leave, and what of a case survives that it runs again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_boards import fake_boards

from hil.controller.devices.board_resolver import choose
from hil.controller.models.flows import load_flow
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.options import Options
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.suites.engine import Engine
from hil.controller.workloads.suites.preparing import suite_runner
from hil.controller.workloads.suites.request import Request
from hil.controller.workloads.suites.spec import CaseSpec
from hil.controller.workloads.suites.store import SuiteRun
from hil.controller.workloads.suites.tasks import Task, fresh
from hil.core.results import Outcome, Timings
from hil.errors import BoardLost, ImportFailed

__all__ = ["fake_boards"]


@pytest.fixture
def engine(tmp_path):
    """An engine of two boards on which nothing runs yet."""
    choices = [choose(f"unix:{tmp_path / name}", "") for name in ("a", "b")]
    with Isolated(1) as isolated:
        context = RunContext(Cache(tmp_path / "cache"), isolated)
        run = SuiteRun(tmp_path / "run", {})
        yield Engine(Request("s"), load_flow("onnxruntime"), choices, suite_runner(context), run)


def task(name: str, *boards: str) -> Task:
    return Task(Case(name, Path(name), Options(), Path()), boards=boards)


def test_a_case_meant_for_a_board_that_leaves_goes_to_one_that_is_left(engine):
    a, b = engine._slots
    again = task("again", b.name)
    assert engine._queue.put(again)
    engine._leave(b.name, BoardLost("gone"))
    assert engine._queue.take(a.name) is again and engine._ended.empty()
    # It is lost only with the last board.
    assert engine._put(task("late", b.name))
    engine._leave(a.name, BoardLost("gone too"))
    ended = engine._ended.get(timeout=1)
    assert ended.case.outcome is Outcome.BOARD_LOST and "gone too" in ended.case.reason


def test_a_case_that_runs_again_keeps_no_times_of_the_run_before():
    before = Timings(
        import_s=1, compile_s=2, push_s=3, load_s=4, warmup_s=5, run_s=6, fetch_s=7, refer_s=8, compare_s=9
    )
    case = replace(task("x").case, timings=before, outcome=Outcome.FAIL)
    assert fresh(case).timings == Timings(import_s=1, compile_s=2)
    assert case.timings is before


def test_when_a_suite_is_given_up_the_cases_to_come_are_not_begun(fake_boards, engine):
    begun = []

    def make(folder):
        begun.append(folder)
        if len(begun) > 200:
            engine._over.wait(30)
        raise ImportFailed("no model")

    ended = engine.run([CaseSpec(f"case{number}", "m", make) for number in range(1000)])
    assert next(ended).case.outcome is Outcome.IMPORT_ERROR
    ended.close()
    assert len(begun) < 500

"""The suite engine: cases of lost boards and repeated cases."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fake_boards import fake_boards

from hil.controller.devices.choosing.board_resolver import choose
from hil.controller.models.flows.flow_registry import load_flow
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.settings.options import Options
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.suites.cases.spec import CaseSpec
from hil.controller.workloads.suites.engine import Engine
from hil.controller.workloads.suites.preparing import make_suite_runner
from hil.controller.workloads.suites.request import SuiteRequest
from hil.controller.workloads.suites.store import SuiteDirectory
from hil.controller.workloads.suites.tasks import Task, drop_results
from hil.core.results import Outcome, Stage, Timings
from hil.errors import BoardLost, BoardUnfit, ImportFailed

__all__ = ["fake_boards"]


@pytest.fixture
def engine(tmp_path):
    """Return an idle engine with two boards."""
    choices = [choose(f"unix:{tmp_path / name}", "") for name in ("a", "b")]
    with Isolated(1) as isolated:
        context = RunContext(Cache(tmp_path / "cache"), isolated)
        run = SuiteDirectory(tmp_path / "run")
        yield Engine(SuiteRequest("s"), load_flow("onnxruntime"), choices, make_suite_runner(context), run)


def task(name: str, *boards: str) -> Task:
    return Task(Case(name, Path(name), Options(), Path()), boards=boards)


def test_engine_moves_case_of_lost_board_to_remaining_board(engine):
    a, b = engine._slots
    again = task("again", b.name)
    assert engine._queue.put(again)
    engine._drop_board(b.name, BoardLost("gone"))
    assert engine._queue.take(a.name) is again and engine._ended.empty()
    # It is lost only with the last board.
    assert engine._queue_task(task("late", b.name))
    engine._drop_board(a.name, BoardLost("gone too"))
    ended = engine._ended.get(timeout=60)
    assert ended.case.outcome is Outcome.BOARD_LOST and "gone too" in ended.case.reason


def test_fresh_case_drops_times_of_earlier_run():
    before = Timings(
        import_s=1, compile_s=2, push_s=3, load_s=4, warmup_s=5, run_s=6, fetch_s=7, refer_s=8, compare_s=9
    )
    case = replace(task("x").case, timings=before, outcome=Outcome.FAIL)
    assert drop_results(case).timings == Timings(import_s=1, compile_s=2)
    assert case.timings is before


@pytest.fixture
def serve(fake_boards, engine, monkeypatch):
    """Serve cases on two fake boards of which some are unfit. Return the tasks by case, as they ended."""

    def run(names: str, *unfit: str) -> dict[str, Task]:
        def execute(case, session):
            if session.board.name in unfit:
                return case.with_error(BoardUnfit("the disk is full"), Stage.PUSH)
            return replace(case, outcome=Outcome.PASS)

        monkeypatch.setattr(engine, "_runner", SimpleNamespace(execute=execute))
        a, b = engine._slots
        for name in names:
            assert engine._queue.put(task(name, b.name))
        threads = [threading.Thread(target=engine._serve_slot, args=(slot,), daemon=True) for slot in (a, b)]
        for thread in threads:
            thread.start()
        ended = [engine._ended.get(timeout=60) for _ in names]
        engine._queue.close()
        for thread in threads:
            thread.join(60)
        return {one.case.name: one for one in ended}

    return run


def test_engine_moves_cases_of_unfit_board(serve, engine):
    a, b = (slot.name for slot in engine._slots)
    ended = serve("vwxyz", b)
    assert {(one.case.outcome, one.board) for one in ended.values()} == {(Outcome.PASS, a)}
    # After three unfit cases in a row, the board gets no further cases.
    assert [[one["why"] for one in ended[name].attempts] for name in "vwxyz"] == [["board unfit"]] * 3 + [[]] * 2


def test_case_unfit_for_every_board_ends_unfit(serve, engine):
    ended = serve("x", *(slot.name for slot in engine._slots))
    assert ended["x"].case.outcome is Outcome.BOARD_UNFIT and len(ended["x"].attempts) == 1


def test_closed_engine_does_not_begin_remaining_cases(fake_boards, engine):
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

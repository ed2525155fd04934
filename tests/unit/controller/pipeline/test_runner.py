"""Runner and boards: the effect of board events on cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.fake_boards import FakeBoards, fake_boards, fake_case, fake_choice, lost

from hil.controller.devices.board_choice import use_device
from hil.controller.pipeline.boards.board_pool import BoardPool
from hil.controller.pipeline.case import Case, ProgressSink
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.stages import PIPELINE, STAGES
from hil.controller.storage.cache import Cache
from hil.controller.storage.run_context import RunContext
from hil.core.boards import load_board
from hil.core.results import Outcome, RunResult, Stage
from hil.errors import (
    BoardLost,
    BoardRefused,
    BoardUnfit,
    BoardUnreachable,
    HilError,
    LoadFailed,
    RunCrashed,
    RunFailed,
    StageTimeout,
    UsageError,
)

__all__ = ["fake_boards"]
A = "unix:/fake/a"


class Pool:
    """Fake for unused isolated processes."""

    workers = 2
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def context(tmp_path: Any) -> RunContext:
    return RunContext(Cache(tmp_path), Pool())  # type: ignore[arg-type]


def go(context: RunContext, *cases: Case, most_loaded: int = 0) -> list[Case]:
    with BoardPool("a test", most_loaded=most_loaded) as pool:
        return list(Runner(context).run(cases, pool, fake_choice()))


def outcomes(cases: list[Case]) -> list[str]:
    return [str(case.outcome and case.outcome.value) for case in cases]


def test_case_passes_stages_in_order(fake_boards: FakeBoards, context: RunContext) -> None:
    (case,) = go(context, fake_case("a"))
    assert case and case.result is not None and case.worker_log == ("ran",) and case.pushed_bytes == 8
    assert fake_boards.did == ["push a", "load a", "run a", "unload a", "close"]
    assert [span.name for span in case.spans] == ["push", "load", "run", "compare"]
    assert STAGES == tuple(step.stage for step in PIPELINE) == tuple(Stage)[: len(STAGES)]


def test_runner_opens_board_once_for_all_cases(fake_boards: FakeBoards, context: RunContext) -> None:
    assert outcomes(go(context, *map(fake_case, "abc"))) == ["PASS"] * 3
    assert len(fake_boards.opened) == 1 and fake_boards.opened[0].closed


def test_stages_do_not_change_given_case(fake_boards: FakeBoards, context: RunContext) -> None:
    before = fake_case("a")
    (after,) = go(context, before)
    assert before.result is None and before.outcome is None and before.spans == ()
    assert after.options is before.options and after.references is before.references


@pytest.mark.parametrize(("board", "arithmetic"), [("sim", "float32"), ("sim-undeclared", None)])
def test_exact_simulator_records_float32(
    fake_boards: FakeBoards, context: RunContext, board: str, arithmetic: str | None
) -> None:
    choice = replace(fake_choice(), config=load_board(board).config)
    with BoardPool("a test") as pool:
        (case,) = Runner(context).run([fake_case("a")], pool, choice)
    assert case.result is not None and case.result.provenance.get("arithmetic") == arithmetic


# Event -> where it happens, outcomes of the cases a, b and c, number of opened boards.
EVENTS = {
    "nothing": ({}, [], ["PASS", "PASS", "PASS"], 1),
    "board lost before the run": ({("push", "b"): lost()}, [], ["PASS", "BOARD_LOST", "PASS"], 2),
    "board lost while loading": ({("load", "b"): lost()}, [], ["PASS", "BOARD_LOST", "PASS"], 2),
    "board lost in the run": ({("run", "b"): lost()}, [], ["PASS", "BOARD_LOST", "PASS"], 2),
    "board has no room": ({("push", "b"): BoardUnfit("full")}, [], ["PASS", "BOARD_UNFIT", "PASS"], 1),
    "board has no memory": ({("run", "b"): BoardUnfit("killed")}, [], ["PASS", "BOARD_UNFIT", "PASS"], 1),
    "program cannot be loaded": ({("load", "b"): LoadFailed("no")}, [], ["PASS", "LOAD_ERROR", "PASS"], 1),
    "program fails": ({("run", "b"): RunFailed("no")}, [], ["PASS", "RUN_ERROR", "PASS"], 1),
    "program crashes": ({("run", "b"): RunCrashed("SIGSEGV")}, [], ["PASS", "RUN_CRASH", "PASS"], 1),
    "program hangs": ({("run", "b"): StageTimeout("late")}, [], ["PASS", "TIMEOUT", "PASS"], 1),
    "nobody answers": ({}, [BoardUnreachable("none")], ["BOARD_UNREACHABLE"] * 3, 0),
    "nobody lets us in": ({}, [BoardRefused("key")], ["BOARD_REFUSED"] * 3, 0),
}


@pytest.mark.parametrize("most_loaded", [0, 1], ids=["unloaded", "kept loaded"])
@pytest.mark.parametrize("event", EVENTS)
def test_board_event_ends_only_affected_case(
    fake_boards: FakeBoards, context: RunContext, event: str, most_loaded: int
) -> None:
    script, refused, wanted, opened = EVENTS[event]
    fake_boards.scripts[A], fake_boards.refuse[A] = dict(script), list(refused)
    cases = go(context, *map(fake_case, "abc"), most_loaded=most_loaded)
    assert outcomes(cases) == wanted
    assert len(fake_boards.opened) == opened and all(board.closed for board in fake_boards.opened)
    # No case runs twice.
    assert [one for one in fake_boards.did if one.startswith("run b")] == ["run b"][: "run b" in fake_boards.did]


def test_lost_board_ends_remaining_cases(fake_boards: FakeBoards, context: RunContext) -> None:
    class Once(dict[tuple[str, str], BaseException]):
        def pop(self, key: Any, default: Any = None) -> Any:
            if key in self:
                fake_boards.refuse[A] = [BoardUnreachable("gone for good")]
            return super().pop(key, default)

    fake_boards.scripts[A] = Once({("run", "a"): lost()})
    cases = go(context, *map(fake_case, "abc"))
    assert outcomes(cases) == ["BOARD_LOST", "BOARD_UNREACHABLE", "BOARD_UNREACHABLE"]
    assert [case.reason for case in cases] == ["the link broke", "gone for good", "gone for good"]
    assert [case.stage for case in cases] == ["run", "push", "push"]


@pytest.mark.parametrize("stage", ["push", "load", "run"])
def test_ctrl_c_in_any_stage_releases_board(fake_boards: FakeBoards, context: RunContext, stage: str) -> None:
    fake_boards.scripts[A] = {(stage, "b"): KeyboardInterrupt()}
    seen: list[Case] = []
    with pytest.raises(KeyboardInterrupt), BoardPool("a test") as pool:
        seen.extend(Runner(context).run(list(map(fake_case, "abc")), pool, fake_choice()))
    assert fake_boards.opened[0].closed and "push c" not in fake_boards.did
    assert context.isolated.closed
    if stage == "run":
        assert fake_boards.did[-2:] == ["unload b", "close"]


@pytest.mark.parametrize("stage", ["push", "load", "run"])
def test_usage_error_of_board_propagates(fake_boards: FakeBoards, context: RunContext, stage: str) -> None:
    fake_boards.scripts[A] = {(stage, "a"): UsageError("not that way")}
    with pytest.raises(UsageError, match="not that way"):
        go(context, fake_case("a"))
    assert fake_boards.opened[0].closed


def test_usage_error_may_become_outcome(fake_boards: FakeBoards, context: RunContext) -> None:
    def as_outcome(error: UsageError, stage: Stage) -> HilError:
        return RunFailed(f"in {stage.value}: {error.message}")

    fake_boards.scripts[A] = {("load", "a"): UsageError("not that way")}
    with BoardPool("a test") as pool:
        (case,) = Runner(context, of_usage=as_outcome).run([fake_case("a")], pool, fake_choice())
    assert (case.outcome, case.stage, case.reason) == (Outcome.RUN_ERROR, "load", "in load: not that way")
    assert case.pushed_bytes == 8  # earlier results are kept


def test_program_stays_loaded_until_change_or_crash(fake_boards: FakeBoards, context: RunContext) -> None:
    first, second = fake_case("a"), fake_case("b")
    again = replace(first, name="a again")
    fake_boards.scripts[A] = {("run", "b"): RunCrashed("SIGILL")}
    cases = go(context, first, again, second, replace(second, name="b again"), most_loaded=1)
    assert outcomes(cases) == ["PASS", "PASS", "RUN_CRASH", "PASS"]
    assert [one for one in fake_boards.did if one.split()[0] in ("load", "unload")] == [
        "load a", "unload a", "load b", "unload b", "load b", "unload b",
    ]  # fmt: skip


def test_runner_does_not_repeat_failed_load(fake_boards: FakeBoards, context: RunContext) -> None:
    fake_boards.scripts[A] = {("load", "a"): LoadFailed("no such operator")}
    case = fake_case("a")
    cases = go(context, case, replace(case, name="a again"), most_loaded=1)
    assert outcomes(cases) == ["LOAD_ERROR"] * 2 and fake_boards.did.count("load a") == 1


def test_judge_uses_prefetched_references(fake_boards: FakeBoards, context: RunContext) -> None:
    case = replace(fake_case("a"), references=())
    early = replace(case, references=(RunResult("early", {"y": np.array([2, 4], np.float32)}),)).with_timings(
        refer_s=1.5
    )
    with BoardPool("a test") as pool:
        ran = Runner(context).execute(case, pool.session(fake_choice()))
    judged = Runner(context).judge(ran, early)
    assert judged and judged.references[0].source == "early" and judged.timings.refer_s == 1.5


def test_failed_prefetched_reference_ends_case(fake_boards: FakeBoards, context: RunContext) -> None:
    case = replace(fake_case("a"), references=())
    early = case.with_error(RunFailed("the oracle died"), Stage.REFER)
    with BoardPool("a test") as pool:
        ran = Runner(context).execute(case, pool.session(fake_choice()))
    judged = Runner(context).judge(ran, early)
    assert judged.reason == "the oracle died" and judged.result is not None


def test_sink_receives_progress_per_stage(fake_boards: FakeBoards, context: RunContext) -> None:
    told: list[str] = []
    sink = ProgressSink(
        stage=lambda case, stage, note: told.append(f"{stage.value} {note}".strip()),
        keep=lambda case, what: told.append(f"keep {what}"),
        ended=lambda case: told.append(f"ended {case.name}"),
    )
    fake_boards.scripts[A] = {("run", "b"): RunFailed("no")}
    with BoardPool("a test") as pool:
        list(Runner(context, sink=sink).run([fake_case("a"), fake_case("b")], pool, fake_choice()))
    assert told == [
        "keep references", "push", "push 0 of 0 KiB", "load", "run", "keep inputs", "keep outputs", "compare",
        "keep references", "push", "push 0 of 0 KiB", "load", "run", "keep inputs", "ended b",
    ]  # fmt: skip


def test_ended_case_passes_through(fake_boards: FakeBoards, context: RunContext) -> None:
    done = fake_case("a").with_error(RunFailed("before"), Stage.RUN)
    assert go(context, done)[0].reason == "before" and fake_boards.opened == []


def test_pool_opens_one_session_of_a_board_with_several_devices(fake_boards: FakeBoards) -> None:
    choice = fake_choice()
    with BoardPool("a test") as pool:
        first = pool.session(choice)
        gpu = pool.session(use_device(choice, "iree", "vulkan"))
        assert (first.board.closed, gpu.board.closed) == (True, False)
        assert gpu.board.config.devices == {"iree": "vulkan"}
        pool.session(fake_choice("b"))
        assert not gpu.board.closed
        assert pool.session(choice) is not first and gpu.board.closed


def test_pool_adds_targets_of_later_runtimes(fake_boards: FakeBoards) -> None:
    choice = fake_choice()
    with BoardPool("a test") as pool:
        for runtime in ("onnxruntime", "iree", "iree"):
            pool.session(choice, runtimes=(runtime,))
        (board,) = fake_boards.opened
        assert board.targets == ["onnxruntime", "iree"]


def test_closed_pool_refuses_sessions(fake_boards: FakeBoards) -> None:
    pool = BoardPool("a test")
    pool.session(fake_choice())
    pool.close()
    with pytest.raises(BoardLost, match="the boards were released"):
        pool.session(fake_choice("b"))
    assert [board.closed for board in fake_boards.opened] == [True]


def test_rejected_board_gets_closed(fake_boards: FakeBoards) -> None:
    def refuse(board: Any) -> None:
        raise BoardRefused("it needs other programs")

    with BoardPool("a test", opened=refuse) as pool, pytest.raises(BoardRefused):
        pool.session(fake_choice())
    assert fake_boards.opened[0].closed and not pool.any_open


def test_boards_with_other_faults_are_separate(fake_boards: FakeBoards) -> None:
    with BoardPool("a test") as pool:
        one, other = pool.session(fake_choice()).board, pool.session(fake_choice(), faults=("crash",)).board
        assert one is not other and pool.session(fake_choice()).board is one
        pool.give_back(fake_choice())
        assert [board.closed for board in fake_boards.opened] == [True, False]


def test_board_gets_compile_targets_of_all_runtimes(context, fake_boards):
    with BoardPool("a test") as pool:
        cases = Runner(context).run([fake_case("a")], pool, fake_choice(), runtimes=("tflite", "iree", "tflite"))
        assert outcomes(list(cases)) == ["PASS"]
    assert fake_boards.opened[-1].targets == ["tflite", "iree"]

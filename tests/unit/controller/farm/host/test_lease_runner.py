"""What a worker does with a grant, with a board and a library of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hil.controller.devices.board_client import Target
from hil.controller.farm.host import job_attempt, lease_runner
from hil.controller.farm.host.lease_runner import Attempt, LeaseRunner
from hil.controller.farm.messages import BoardCard, Grant, JobResult, JobSpec, Kind
from hil.controller.farm.paths import FarmAddress
from hil.errors import BoardBusy, FarmUnreachable, HilError, UsageError

GRANT = Grant(5, "17", 17, "rpi5", 3, 6.0, 60.0, 1, JobSpec(Kind.RUN))


class BoardConnection:
    """A board that can be had, or not."""

    def __init__(self, folder: Path, error: HilError | None = None, target: Target | None = None) -> None:
        self.site, self.post = (
            SimpleNamespace(files=folder / "files", sockets=folder, farm=FarmAddress(("unix:g",), "t")),
            SimpleNamespace(name="rpi5", folder=folder),
        )
        self.error, self.target = error, target
        self.shown = BoardCard("rpi5", labels={"kernel": "6.1"})
        self.config = SimpleNamespace(runtime="onnxruntime")
        self.holder, self.taken, self.released = 0, 0, 0
        self.brought = ""

    def bring(self, runtime: str, say: Callable[[str], None]) -> None:
        self.brought = runtime

    def card(self) -> BoardCard:
        return self.shown

    def take(self, grant: Grant) -> None:
        if self.error:
            raise self.error
        self.taken = grant.fence

    def release(self) -> None:
        self.released += 1

    def choice(self, grant: Grant) -> str:
        return f"fence {grant.fence}"

    def is_held(self, fence: int) -> bool:
        return self.holder == fence

    def say(self, text: str) -> None:
        pass


class GatewayStream:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def started(self, lease: int, direct: str) -> None:
        self.told.append(f"started {lease} {direct}")

    def present(self) -> None:
        self.told.append("present")

    def printed(self, lease: int, text: str) -> None:
        self.told.append(text)


def passed(attempt: Attempt) -> JobResult:
    return JobResult(0, "PASS")


@pytest.fixture
def do() -> Callable[..., tuple[JobResult, list[str]]]:
    """Has a duty do a grant: its result, and what the farm was told."""

    def run(way: Any, use: Callable[[Attempt], JobResult] = passed, grant: Grant = GRANT):
        made, attendance = LeaseRunner(way, lambda: None, 1, use), GatewayStream()
        return made.do(grant, attendance), attendance.told

    return run


def test_a_job_begins_when_its_board_was_taken_by_its_fence(do, tmp_path):
    way = BoardConnection(tmp_path)
    seen: list[str] = []
    result, told = do(way, lambda self: (seen.append(self.board), passed(self))[1])
    assert (way.taken, seen, told, way.released) == (3, ["fence 3"], ["started 5 "], 1)
    assert (result.exit_code, list(result.timings)) == (0, ["open"])
    assert 0 < result.board_ns[0] < result.board_ns[1] and not list((tmp_path).glob("job*"))


@pytest.mark.parametrize("error", [BoardBusy("fence 3 is too old"), UsageError("the token file cannot be read")])
def test_a_board_that_cannot_be_had_is_no_fault_of_the_jobs(error, do, tmp_path):
    result, told = do(BoardConnection(tmp_path, error))
    assert (result.exit_code, result.infrastructure, told) == (4, True, []) and error.message in result.reason


def test_what_the_job_itself_did_wrong_is_no_fault_of_the_boards(do, tmp_path):
    def wrong(attempt: Attempt) -> JobResult:
        raise UsageError("no such runtime")

    result, _ = do(BoardConnection(tmp_path), wrong)
    assert (result.exit_code, result.infrastructure) == (2, False)


def test_a_board_that_turned_out_to_be_another_is_presented_anew(do, tmp_path):
    way = BoardConnection(tmp_path)

    def look(grant: Grant) -> None:
        way.shown = replace(way.shown, labels={"kernel": "6.6"})

    way.take = look
    assert do(way)[1] == ["started 5 ", "present"]


def test_the_runtime_that_a_job_needs_is_brought_to_the_board(do, tmp_path):
    way = BoardConnection(tmp_path)
    assert do(way, grant=replace(GRANT, spec=JobSpec(Kind.RUN, {"needs": "tflite"})))[0].exit_code == 0
    assert way.brought == "tflite"


@pytest.mark.parametrize("target", [None, Target("lab:7700", token="secret")], ids=["no agent", "a token"])
def test_a_board_whose_agent_nobody_else_may_call_is_not_held(target, do, tmp_path):
    result, _ = do(BoardConnection(tmp_path, target=target), grant=replace(GRANT, spec=JobSpec(Kind.LEASE)))
    assert (result.exit_code, result.infrastructure) == (2, False) and "nobody can hold rpi5" in result.reason


@pytest.mark.parametrize(("held_by", "clear"), [(0, True), (3, False), (4, True)])
def test_after_a_job_that_was_ended_nothing_of_it_may_be_left_on_the_board(held_by, clear, tmp_path, monkeypatch):
    monkeypatch.setattr(lease_runner, "_FREE_S", 0.1)
    way: Any = BoardConnection(tmp_path)
    way.holder = held_by
    assert LeaseRunner(way, lambda: None, 1, passed).clear_away(3) is clear


def test_a_farm_that_is_away_is_waited_for(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(job_attempt, "time", SimpleNamespace(sleep=slept.append))
    answers: list[Any] = [FarmUnreachable(), FarmUnreachable(), "there"]

    def call() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    assert job_attempt._heard(call) == "there" and slept == [job_attempt.AGAIN_S] * 2


def test_connections_are_led_to_a_board_that_is_held_before_anybody_is_told_that_it_is_there(tmp_path):
    made: Any = LeaseRunner(BoardConnection(tmp_path, target=Target("unix:/a.sock")), lambda: None, 1, passed)
    attendance: Any = GatewayStream()
    attendance.started = lambda lease, direct: attendance.told.append((made.serving.lease, direct))
    result = made.do(replace(GRANT, spec=JobSpec(Kind.LEASE), timeout_s=0.05), attendance)
    assert (attendance.told, result.reason, made.serving) == (
        [(5, f"unix:{tmp_path}/lease-5.sock")],
        "its time is over",
        None,
    )

"""Test how a worker reports an ended job to a fake farm."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hil.controller.farm.host import worker
from hil.controller.farm.host.worker import BoardWorker
from hil.controller.farm.messages import Grant, JobResult, JobSpec, Kind
from hil.errors import FarmError, FarmUnreachable
from hil.protocol.v1 import farm_pb2 as pb

GRANT = Grant(5, "17", 17, "rpi5", 3, 6.0, 60.0, 1, JobSpec(Kind.RUN))


class Reporting:
    """Reporting part of a worker. Each answer is an error, or whether the farm recorded the result."""

    def __init__(self, *answers: Any, over: tuple[int, ...] = (), stopping: bool = False) -> None:
        self.id, self.answers, self.said = "w", list(answers), list[str]()
        self.tried = 0
        self._over, self._stopping = dict.fromkeys(over, "ended"), stopping
        self._attendance = SimpleNamespace(send_lines=lambda: None)
        self._way = SimpleNamespace(fence=7)
        self.site = SimpleNamespace(uplink="u")

    def ask(self, uplink: str, method: str, request: pb.ReportRequest, limit_s: float) -> pb.ReportReply:
        assert (uplink, method, request.lease, request.worker) == ("u", "Report", 5, "w")
        self.tried += 1
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer  # raised when no gateway listens
        return pb.ReportReply(recorded=answer, reason="another was first")

    def print_message(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    # Replace only this module's sleep; other threads sleep too.
    monkeypatch.setattr(worker, "time", SimpleNamespace(sleep=found.append))
    return found


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    def run(self: Any) -> Any:
        monkeypatch.setattr(worker, "ask", self.ask)
        BoardWorker._report_result(self, GRANT, JobResult(0, "PASS"))
        return self

    return run


def test_report_retries_with_pauses_during_farm_outage(slept, report):
    assert report(Reporting(FarmUnreachable(), FarmUnreachable(), True)).tried == 3
    assert len(slept) == 2 and min(slept) > 0


def test_report_drops_results_rejected_by_farm(slept, report):
    assert report(Reporting(over=(5,))).tried == 0
    refused = report(Reporting(FarmError("no such lease")))
    assert refused.tried == 1 and "no such lease" in refused.said[0]
    assert "another was first" in report(Reporting(False)).said[0]


def test_report_retries_briefly_while_worker_stops(slept, report):
    assert report(Reporting(FarmUnreachable(), FarmUnreachable(), stopping=True)).tried == 2 and len(slept) == 1


class Working:
    """Part of a worker that checks a board after a failed job."""

    _check_after_job = BoardWorker._check_after_job

    def __init__(self, probe: JobResult | None, why: str = "", *, stopping: bool = False) -> None:
        self.calls: list[str] = []
        self._over: dict[int, str] = {}
        self._stopping = stopping
        self._attendance = SimpleNamespace(queue_output=lambda lease, text: self.calls.append(text))
        self._work = SimpleNamespace(why=why, run=lambda key, work: work(), end=None)
        self._duty = SimpleNamespace(
            probe=lambda grant: (self.calls.append("probe"), probe)[1],
            clear_away=lambda fence: self.calls.append(f"clear {fence}") or True,
        )

    def _close_client(self) -> None:
        self.calls.append("hang up")


CRASHED = JobResult(3, "RUN_CRASH", "SIGSEGV")
LINE = "RUN_CRASH: checking whether the board still runs programs"


def test_worker_reports_crash_when_board_still_works() -> None:
    working = Working(JobResult(0, "PASS"))
    assert working._check_after_job(GRANT, CRASHED) == CRASHED
    assert working.calls == [LINE, "probe"]


def test_worker_blames_board_after_failed_probe() -> None:
    found = Working(JobResult(3, "RUN_ERROR", "small test model: RUN_ERROR"))._check_after_job(GRANT, CRASHED)
    assert (found.outcome, found.infrastructure) == ("BOARD_UNFIT", True)


def test_worker_blames_board_whose_probe_hangs() -> None:
    working = Working(None, why="board check exceeded 60 s")
    assert working._check_after_job(GRANT, CRASHED).outcome == "BOARD_UNFIT"
    assert working.calls == [LINE, "probe", "hang up", "clear 3"]


def test_worker_keeps_job_result_when_lease_ends_in_probe() -> None:
    working = Working(None, why="the lease ended")
    working._duty.probe = lambda grant: working._over.update({grant.lease: "the lease ended"})
    assert working._check_after_job(GRANT, CRASHED) == CRASHED


def test_worker_reports_nothing_when_stopped_in_probe() -> None:
    working = Working(None, why="the board's host was stopped", stopping=True)
    assert working._check_after_job(GRANT, CRASHED) is None


def test_worker_skips_probe_after_wrong_output() -> None:
    working = Working(None)
    wrong = JobResult(1, "FAIL", "y differs")
    assert working._check_after_job(GRANT, wrong) is wrong and working.calls == []


@pytest.mark.parametrize(
    ("lost", "outcome", "infrastructure"), [(5, "BOARD_LOST", True), (4, "TIMEOUT", False), (0, "TIMEOUT", False)]
)
def test_job_with_lost_place_ends_as_board_lost(lost: int, outcome: str, infrastructure: bool) -> None:
    ended: list[tuple[int, str]] = []
    one: Any = SimpleNamespace(
        _work=SimpleNamespace(why="labgrid place rpi5 is in use by bob", end=lambda *told: ended.append(told)),
        _duty=SimpleNamespace(clear_away=lambda fence: True),
        _close_client=lambda: None,
        _stopping=False,
        _running_lease=lost,
        _lost_lease=0,
        print_message=lambda text: None,
    )
    BoardWorker._handle_lost_place(one, "labgrid place rpi5 is in use by bob")
    assert ended == ([(lost, "labgrid place rpi5 is in use by bob")] if lost else [])
    found = BoardWorker._handle_cancelled(one, GRANT)
    assert found is not None
    assert (found.outcome, found.infrastructure, found.reason) == (outcome, infrastructure, one._work.why)


@pytest.mark.parametrize("is_writing", [True, False])
def test_stopped_worker_ends_only_the_command_of_an_image(is_writing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    monkeypatch.setattr(worker, "end_children", ended.append)
    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)

    def make_part(*names: str, **values: Any) -> Any:
        return SimpleNamespace(**dict.fromkeys(names, lambda *_: True), **values)

    one: Any = SimpleNamespace(
        _work=make_part("run"),
        _attendance=make_part("start", "close"),
        _console=make_part("close"),
        _power=make_part("close", is_writing=is_writing),
        _duty=make_part("release_resources"),
        _way=make_part("close"),
        _close_client=lambda: None,
        _handle_stop=None,
        _inspect_board=None,
        _stopping=True,
    )
    BoardWorker.serve(one)
    assert ended == [()] * is_writing

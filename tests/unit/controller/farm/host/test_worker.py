"""What a worker says of a job that has ended, to a farm of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hil.controller.farm.host import worker
from hil.controller.farm.host.worker import Worker
from hil.controller.farm.messages import Grant, JobResult, JobSpec, Kind
from hil.errors import FarmError, FarmUnreachable
from hil.protocol.v1 import farm_pb2 as pb

GRANT = Grant(5, "17", 17, "rpi5", 3, 6.0, 60.0, 1, JobSpec(Kind.RUN))


class Reporting:
    """The part of a worker that reports; each answer of the farm is an error, or whether the result was recorded."""

    def __init__(self, *answers: Any, over: tuple[int, ...] = (), stopping: bool = False) -> None:
        self.id, self.answers, self.said = "w", list(answers), list[str]()
        self.tried = 0
        self._over, self._stopping = dict.fromkeys(over, "it is over"), stopping
        self._attendance = SimpleNamespace(send_lines=lambda: None)
        self._way = SimpleNamespace(fence=7)
        self.site = SimpleNamespace(uplink="u")

    def ask(self, uplink: str, method: str, request: pb.ReportRequest, limit_s: float) -> pb.ReportReply:
        assert (uplink, method, request.lease, request.worker) == ("u", "Report", 5, "w")
        self.tried += 1
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer  # as where no gateway listens
        return pb.ReportReply(recorded=answer, reason="another was first")

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    # Its sleep alone: other threads of this process sleep, too.
    monkeypatch.setattr(worker, "time", SimpleNamespace(sleep=found.append))
    return found


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    def run(self: Any) -> Any:
        monkeypatch.setattr(worker, "ask", self.ask)
        Worker._report(self, GRANT, JobResult(0, "PASS"))
        return self

    return run


def test_a_farm_that_is_away_hears_a_result_once_it_is_back_and_is_not_called_without_a_pause(slept, report):
    assert report(Reporting(FarmUnreachable(), FarmUnreachable(), True)).tried == 3
    assert len(slept) == 2 and min(slept) > 0


def test_what_the_farm_does_not_want_to_know_is_not_said(slept, report):
    assert report(Reporting(over=(5,))).tried == 0
    refused = report(Reporting(FarmError("no such lease")))
    assert refused.tried == 1 and "no such lease" in refused.said[0]
    assert "another was first" in report(Reporting(False)).said[0]


def test_a_worker_that_is_to_stop_does_not_wait_long_for_a_farm_that_is_away(slept, report):
    assert report(Reporting(FarmUnreachable(), FarmUnreachable(), stopping=True)).tried == 2 and len(slept) == 1

"""Waiting for jobs on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hil.controller.cli.farm_result import wait_for
from hil.errors import FarmUnreachable, NoSuchBoard
from hil.protocol.v1 import farm_pb2 as pb


class Farm:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def follow(self, jobs: Any, *, logs: bool) -> Iterator[Any]:
        raise self.error
        yield


@pytest.mark.parametrize("error", [KeyboardInterrupt(), FarmUnreachable("nobody answers")])
def test_who_waits_no_longer_is_told_that_the_job_goes_on(error: BaseException, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(type(error)):
        wait_for(Farm(error), 17, ["17"], logs=True, as_json=False)
    assert "job 17 goes on: hil farm logs 17 -f" in capsys.readouterr().err


class LineProgress:
    """A farm that tells of jobs: name, state and why no board can run it."""

    def __init__(self, *said: tuple[str, str, str]) -> None:
        self.said = said

    def follow(self, jobs: Any, *, logs: bool) -> Iterator[Any]:
        for name, state, why in self.said:
            job = pb.JobStatus(name=name, state=state, unrunnable=why, board="a", outcome="PASS", exit_code=0)
            yield pb.FollowReply(job=job)
        raise AssertionError("it is still waited for")


def test_nobody_waits_for_a_board_that_fails_check_after_check(capsys: pytest.CaptureFixture[str]):
    why = "a: its check failed 3 times in a row: no answer"
    told = (("17.1", "queued", why), ("17.2", "running", ""), ("17.2", "done", ""))
    with pytest.raises(NoSuchBoard, match=r"no board can run job 17\.1: a: its check failed 3 times") as error:
        wait_for(LineProgress(*told), 17, ["17.1", "17.2"], logs=True, as_json=False)
    assert error.value.exit_code == 4 and "hil farm cancel 17 ends it" in capsys.readouterr().err
    with pytest.raises(AssertionError, match="still waited for"):
        wait_for(LineProgress(*told[:2]), 17, ["17.1", "17.2"], logs=True, as_json=False)

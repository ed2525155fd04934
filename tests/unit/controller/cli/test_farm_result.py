"""Test waiting for jobs on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hil.controller.cli.farm.result import wait_for
from hil.errors import FarmUnreachable, NoSuchBoard
from hil.protocol.v1 import farm_pb2 as pb


class Farm:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def follow(self, jobs: Any, *, logs: bool) -> Iterator[Any]:
        raise self.error
        yield


@pytest.mark.parametrize("error", [KeyboardInterrupt(), FarmUnreachable("nobody answers")])
def test_wait_for_shows_log_command_when_interrupted(error: BaseException, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(type(error)):
        wait_for(Farm(error), 17, ["17"], logs=True, as_json=False)
    assert "job 17 continues: hil farm logs 17 -f" in capsys.readouterr().err


class LineProgress:
    """Farm that reports jobs by name, state, and reason why no board can run them."""

    def __init__(self, *said: tuple[str, str, str]) -> None:
        self.said = said

    def follow(self, jobs: Any, *, logs: bool) -> Iterator[Any]:
        for name, state, why in self.said:
            job = pb.JobStatus(name=name, state=state, unrunnable=why, board="a", outcome="PASS", exit_code=0)
            yield pb.FollowReply(job=job)
        raise AssertionError("it is still waited for")


class BlockedJobs:
    """Farm whose jobs wait for boards out of service, by name and reason."""

    def __init__(self, *waiting: tuple[str, str]) -> None:
        self.waiting = waiting

    def follow(self, jobs: Any, *, logs: bool) -> Iterator[Any]:
        for name, why in self.waiting:
            yield pb.FollowReply(job=pb.JobStatus(name=name, state="queued", blocked=why))
        raise KeyboardInterrupt


@pytest.mark.parametrize("logs", [True, False])
def test_wait_for_shows_unique_waiting_reasons(logs: bool, capsys: pytest.CaptureFixture[str]) -> None:
    fan, cable = "a is drained by ann: fan", "a is drained by ann: new\x1b[2J\ncable"
    waiting = [
        ("17.1", fan),
        ("17.2", fan),
        ("17.1", cable),
        ("17.2", cable),
        ("17.1", ""),
        ("17.2", ""),
        ("17.1", fan),
    ]
    with pytest.raises(KeyboardInterrupt):
        wait_for(BlockedJobs(*waiting), 17, ["17.1", "17.2"], logs=logs, as_json=False)  # type: ignore[arg-type]
    lines = [line for line in capsys.readouterr().err.splitlines() if "waits" in line]
    assert lines[::2] == [f"17.1  waits: {fan}"] * 2
    assert lines[1].startswith("17.1  waits: a is drained by ann: new") and lines[1].endswith(" cable"), lines
    assert "\x1b" not in lines[1] and len(lines) == 3


def test_wait_for_fails_when_remaining_jobs_lack_boards(capsys: pytest.CaptureFixture[str]):
    why = "a: health check failed 3 times in a row: no answer"
    told = (("17.1", "queued", why), ("17.2", "running", ""), ("17.2", "done", ""))
    with pytest.raises(NoSuchBoard, match=r"no board can run job 17\.1: a: health check failed 3 times") as error:
        wait_for(LineProgress(*told), 17, ["17.1", "17.2"], logs=True, as_json=False)
    assert error.value.exit_code == 4 and "hil farm cancel 17 cancels it" in capsys.readouterr().err
    with pytest.raises(AssertionError, match="still waited for"):
        wait_for(LineProgress(*told[:2]), 17, ["17.1", "17.2"], logs=True, as_json=False)

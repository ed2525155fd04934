"""Test the history of a farm."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest
from support import fake_farm_client as client

from hil.controller.farm.timeline import (
    QueueTimes,
    Stay,
    compute_board_use,
    find_lease_periods,
    parse_moment,
    queue_times,
)
from hil.controller.records.base import make_record
from hil.controller.records.lab.farm import FarmEvent, FarmJob


def at(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc).isoformat()


def event(what: str, seconds: float, lease: int | None = None, job: str = "", board: str = "", reason: str = "") -> Any:
    whole = {"id": 0, "at": at(seconds), "what": what, "board": board, "job": job, "lease": lease, "reason": reason}
    return make_record(whole, FarmEvent)


def job(queued: float, begun: float | None) -> Any:
    return make_record(client.job("1", queued_at=at(queued), started_at=at(begun)), FarmJob)


def test_moment_parses_timestamp() -> None:
    assert parse_moment("1970-01-01T01:00:10.500000+01:00") == 10.5
    assert parse_moment(None) is None


def test_stays_list_leases_of_boards() -> None:
    events = [
        event("lease.ended", 1, 4, "1", "pi", "done"),
        event("board.suspect", 2, board="pi"),
        event("job.granted", 10, 5, "2", "pi"),
        event("lease.started", 12, 5, "2", "pi"),
        event("job.granted", 13, 6, "3", "nano"),
        event("lease.ended", 20, 5, "2", "pi", "the board was lost"),
        event("lease.late_report", 21, 5, "2", "pi"),
    ]
    assert find_lease_periods(events) == [
        Stay(4, "1", "pi", None, 1.0, "done"),
        Stay(5, "2", "pi", 10.0, 20.0, "the board was lost"),
        Stay(6, "3", "nano", 13.0, None),
    ]


def test_board_use_computes_share_of_busy_time() -> None:
    had = [
        Stay(1, "1", "pi", None, 5.0),
        Stay(2, "2", "pi", 15.0, 35.0),
        Stay(3, "3", "nano", 38.0, None),
        Stay(4, "4", "gone", 0.0, 40.0),
        Stay(5, "5", "pi", 100.0, 200.0),
    ]
    used = compute_board_use(had, ["pi", "nano", "idle"], 0.0, 40.0, 4)
    assert used == {"pi": [0.5, 0.5, 1.0, 0.5], "nano": [0, 0, 0, pytest.approx(0.2)], "idle": [0, 0, 0, 0]}


def test_queue_times_summarize_waits_per_interval() -> None:
    jobs = [job(0, 1), job(0, 3), job(0, 9), job(8, 15), job(5, None), job(0, 50)]
    assert queue_times(jobs, 0.0, 20.0, 2) == [QueueTimes(0.0, 3, 3.0, 9.0), QueueTimes(10.0, 1, 7.0, 7.0)]
    assert queue_times([], 0.0, 20.0, 1) == [QueueTimes(0.0)]

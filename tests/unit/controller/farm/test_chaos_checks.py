"""Test that the chaos test's checks find violations in made-up journals and tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.farm_chaos_checks import (
    Board,
    board_of,
    board_violations,
    lease_violations,
    read_journal,
    result_violations,
    retry_violations,
)


def journal(*lines: str) -> Board:
    """Parse a journal of lines like ``10 session opened 1`` (time, event, fence)."""
    events = []
    for line in lines:
        at, what = line.split(" ", 1)
        head, _, fence = what.rpartition(" ")
        events.append({"at_ns": int(at), "what": head, "fence": int(fence)})
    return board_of("b", events)


GOOD = ("1 agent started 0", "2 session opened 1", "3 load begins 1", "4 load ended 1", "9 session ended 1")


def test_board_check_accepts_valid_journal() -> None:
    board = journal(*GOOD, "10 session opened 4", "11 invoke begins 4", "12 invoke ended 4", "13 session ended 4")
    assert len(board.sessions) == len(board.runs) == 2
    assert list(board_violations(board)) == []


def test_board_check_accepts_session_reopened_with_same_fence() -> None:
    assert list(board_violations(journal(*GOOD, "10 session opened 1", "11 session ended 1"))) == []


def test_board_check_ends_open_sessions_at_agent_restart() -> None:
    board = journal("1 agent started 0", "2 session opened 1", "3 invoke begins 1", "5 agent started 0", *GOOD[1:][-1:])
    assert [session.ended for session in board.sessions] == [5]
    again = journal("2 session opened 1", "3 invoke begins 1", "5 agent started 0", "6 session opened 2")
    assert list(board_violations(again)) == []


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (("2 session opened 1", "3 session opened 2", "4 session ended 1"), "sessions 1 and 2 at once"),
        (("2 session opened 2", "3 session ended 2", "4 session opened 1"), "fence 1 after one with 2"),
        ((*GOOD, "10 invoke begins 1", "11 invoke ended 1"), "outside of every session"),
        ((*GOOD, "10 session opened 2", "11 invoke begins 1"), "when a higher one was there"),
        (
            ("2 session opened 1", "3 invoke begins 1", "4 session ended 1", "5 session opened 2", "6 invoke ended 1"),
            "invoke under fence 1 went on for 0.000 s beside a session of a higher one",
        ),
        ((*GOOD, "10 load begins 3", "11 load ended 3"), "outside of every session"),
    ],
)
def test_board_check_reports_overlapping_work(lines: tuple[str, ...], says: str) -> None:
    assert any(says in one for one in board_violations(journal(*lines)))


def lease(
    fence: int, granted_at: float, ended_at: float | None, job: str = "1", counted: bool = True, kind: str = "bundle"
) -> dict:
    times = {"granted_at": granted_at, "ended_at": ended_at}
    return {"board": "b", "fence": fence, "job": job, "kind": kind, "counted": counted, **times}


@pytest.mark.parametrize(
    ("leases", "says"),
    [
        ([lease(1, 0, 2), lease(2, 1, 3)], "leases 1 and 2 at once"),
        ([lease(1, 0, None), lease(2, 1, 3)], "leases 1 and 2 at once"),
        ([lease(1, 0, 1), lease(1, 1, 3)], "two leases of fence 1"),
        ([lease(2, 0, 1, counted=False)], "a session with fence 1, which no lease has"),
        ([lease(1, 0, 1), lease(2, 1, 2)], "has a result, and never had it by 2"),
    ],
)
def test_lease_check_reports_overlapping_or_missing_leases(leases: list[dict], says: str) -> None:
    assert any(says in one for one in lease_violations(leases, {"b": journal(*GOOD)}))


def test_lease_check_accepts_valid_leases() -> None:
    leases = [lease(2, 5, 6, counted=False), lease(3, 6, 7, kind="health"), lease(1, 0, 5)]
    assert list(lease_violations(leases, {"b": journal(*GOOD)})) == []


def job(name: str = "1", state: str = "done", results: int = 1, exit_code: int = 0, outcome: str = "PASS") -> dict:
    return {
        "name": name,
        "state": state,
        "results": results,
        "exit_code": exit_code,
        "outcome": outcome,
        "reason": "why",
    }


@pytest.mark.parametrize(
    ("jobs", "says"),
    [
        ([], "job 1 is there 0 times"),
        ([job(), job()], "job 1 is there 2 times"),
        ([job(state="running", results=0)], "job 1 is running"),
        ([job(results=0)], "job 1 has 0 results"),
        ([job(exit_code=1, outcome="FAIL")], "job 1 ended with 1 FAIL (why), not with 0 PASS"),
    ],
)
def test_result_check_reports_missing_or_wrong_result(jobs: list[dict], says: str) -> None:
    assert any(says in one for one in result_violations(jobs, {"1": (0, "PASS")}))


def test_result_check_accepts_valid_results() -> None:
    assert list(result_violations([job(), job("2", exit_code=3, outcome="RUN_CRASH")], {"1": (0, "PASS")})) == []


@pytest.mark.parametrize(
    ("leases", "says"),
    [
        ([lease(1, 0, 1), lease(2, 2, 3)], "2 leases say"),
        ([lease(1, 0, 1, counted=False)], "0 leases say"),
        ([lease(1, 0, 1), lease(2, 2, 3, counted=False)], "given a board after its result"),
    ],
)
def test_retry_check_reports_lease_after_result(leases: list[dict], says: str) -> None:
    assert any(says in one for one in retry_violations(leases, {"1"}))


def test_retry_check_accepts_retries_before_result() -> None:
    leases = [lease(1, 0, 1, counted=False), lease(2, 2, 3), lease(3, 4, 5, job="2")]
    assert list(retry_violations(leases, {"1"})) == []


def test_read_journal_accepts_truncated_last_line(tmp_path: Path) -> None:
    whole = json.dumps({"at_ns": 1, "what": "agent started"})
    (tmp_path / "journal.jsonl.1").write_text(whole + "\n")
    (tmp_path / "journal.jsonl").write_text(whole + "\n" + whole[:9])
    assert [event["what"] for event in read_journal(tmp_path)] == ["agent started"] * 2

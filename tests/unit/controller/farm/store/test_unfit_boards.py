"""Test jobs on full, read-only or stuck boards: hil moves the job and checks the board."""

from __future__ import annotations

import pytest
from support.farm_desks import PASSED, Desk

from hil.controller.farm.messages import PROBE_SECONDS, JobResult, Kind

UNFIT = JobResult(4, "BOARD_UNFIT", "the disk is full", infrastructure=True)


def fail_on_each(desk: Desk, name: str) -> list[str]:
    """Report a job and all checks as unfit until the job ends. Return the boards that it had."""
    tried = []
    while grants := [one for one in desk.grants() if one.job == name]:
        tried.append(grants[0].board)
        desk.report(grants[0], UNFIT)
        for check in [one for one in desk.grants() if one.spec.kind is Kind.HEALTH]:
            desk.report(check, UNFIT)
    return tried


@pytest.mark.ci
def test_unfit_job_tries_every_board_before_failing(desk: Desk) -> None:
    desk.online("a", "b", "c", "d")
    [name] = desk.submit(max_attempts=2)
    assert sorted(fail_on_each(desk, name)) == ["a", "b", "c", "d"]
    assert desk.result(name)["outcome"] == "BOARD_UNFIT"
    assert {desk.board(board)["state"] for board in "abcd"} == {"quarantined"}
    assert desk.board("a")["reason"] == "health check failed: the disk is full"


def test_unfit_job_passes_on_last_fit_board(desk: Desk) -> None:
    desk.online("a", "b", "c", "d")
    [name] = desk.submit(max_attempts=1)
    for _ in range(3):
        [grant] = [one for one in desk.grants() if one.job == name]
        desk.report(grant, UNFIT)
    [grant] = [one for one in desk.grants() if one.job == name]
    desk.report(grant, PASSED)
    assert desk.result(name)["outcome"] == "PASS"


def test_unfit_job_ignores_boards_outside_selector_and_pin(desk: Desk) -> None:
    desk.online("a", labels={"chip": "a53"})
    desk.online("b", labels={"chip": "a72"})
    [chosen] = desk.submit(selector="chip=a53", max_attempts=1)
    [pinned] = desk.submit(board="b", max_attempts=1)
    assert fail_on_each(desk, chosen) == ["a"] and fail_on_each(desk, pinned) == ["b"]
    assert [desk.result(name)["outcome"] for name in (chosen, pinned)] == ["BOARD_UNFIT"] * 2


def test_lease_includes_time_for_check_after_job_limit(desk: Desk) -> None:
    desk.online("a", "b")
    [job, held] = [*desk.submit(timeout_s=10.0), *desk.submit(kind=Kind.LEASE, timeout_s=10.0)]
    extra = {}
    for grant in desk.grants():
        lease = desk.lease(grant.lease)
        extra[grant.job] = (lease["until"] - lease["granted_at"]).total_seconds() - 10.0
    assert PROBE_SECONDS < extra[job] < PROBE_SECONDS + 15 and abs(extra[held]) < 1

"""Test reports of workers and holders, and their effect on jobs and boards."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.farm_desks import BROKEN, PASSED, Desk

from hil.controller.farm.leasing import leases
from hil.controller.farm.leasing.leases import WorkerBeat
from hil.controller.farm.messages import JobResult, Kind
from hil.controller.records.base import make_record
from hil.errors import AccessRefused


@pytest.fixture
def farm(desk: Desk) -> Desk:
    """Return a farm with one online board."""
    desk.online("a")
    return desk


@pytest.mark.parametrize(
    "result",
    [
        PASSED,
        JobResult(1, "FAIL", "differs"),
        JobResult(3, "COMPILE_ERROR", "no such op"),
        JobResult(3, "TIMEOUT", "too slow"),
    ],
    ids=lambda one: one.outcome,
)
def test_report_records_final_result(farm: Desk, result: JobResult) -> None:
    [name] = farm.submit(max_attempts=3)
    lease = farm.grant("a").lease
    assert farm.report(lease, result) == (True, "")
    assert farm.jobs() == {name: "done"}
    assert (farm.result(name)["exit_code"], farm.result(name)["outcome"]) == (result.exit_code, result.outcome)
    assert make_record(farm.result(name)["result"], JobResult) == result
    assert farm.result(name)["lease"] == lease
    assert farm.board("a")["state"] == "online"
    assert farm.grants() == []
    assert farm.rows("select from procrastinate_jobs") == []


def test_report_accepts_repeat_and_rejects_different_result(farm: Desk) -> None:
    [name] = farm.submit()
    lease = farm.grant("a").lease
    odd = JobResult(1, "FAIL", "a\0b", record={"b": 3.4e38, "a": float("nan")}, timings={"run": 0.5}, board_ns=(5, 7))
    assert farm.report(lease, odd) == (True, "")
    assert farm.report(lease, odd) == (True, "")
    assert farm.report(lease, PASSED) == (False, "the lease has ended: result already recorded")
    assert farm.result(name)["outcome"] == "FAIL"
    assert farm.result(name)["result"]["record"] == {"a": "nan", "b": 34 * 10**37}
    assert farm.rows("select count(*) from hil.events where what = 'lease.ended' and lease = %s", lease) == [
        {"count": 1}
    ]


def test_infrastructure_error_moves_job_and_checks_board(farm: Desk) -> None:
    farm.online("b")
    [name] = farm.submit(board="")
    assert farm.report(farm.grant("a"), BROKEN) == (True, "")
    assert farm.grant("b").job == name
    check = farm.grant("a")
    assert check.spec.kind is Kind.HEALTH
    assert farm.board("a")["state"] == "suspect"
    assert farm.board("a")["reason"] == f"job {name} failed: the board stopped answering"
    farm.report(farm.grant("b"))
    assert farm.jobs() == {name: "done"}


def test_infrastructure_error_ends_job_after_last_attempt(farm: Desk) -> None:
    farm.online("b")
    [name] = farm.submit(max_attempts=2)
    farm.report(farm.grant("a"), BROKEN)
    farm.report(farm.grant("b"), BROKEN)
    assert farm.jobs() == {name: "done"}
    result = farm.result(name)
    assert (result["exit_code"], result["outcome"]) == (4, "BOARD_LOST")
    assert result["result"]["reason"] == "the board stopped answering (attempt 2 of 2)"


def test_failed_checks_lengthen_quarantine(farm: Desk) -> None:
    farm.submit(max_attempts=1)
    farm.report(farm.grant("a"), BROKEN)
    waits = []
    for failures in (1, 2, 3):
        farm.report(farm.grant("a"), JobResult(4, "BOARD_LOST", "no answer", infrastructure=True))
        assert (farm.board("a")["state"], farm.board("a")["failures"]) == ("quarantined", failures)
        assert "no answer" in farm.board("a")["reason"]
        [row] = farm.rows("select extract(epoch from check_at - now())::float as wait_s from hil.boards")
        waits.append(round(row["wait_s"] / farm.settings.quarantine_s))
        assert farm.tick() == 0
        farm.rows("update hil.boards set check_at = now()")
        assert farm.tick() > 0
    assert waits == [1, 2, 4]
    assert farm.grant("a").spec.options == {"state": "quarantined", "failures": 3}
    farm.report(farm.grant("a"))
    assert (farm.board("a")["state"], farm.board("a")["failures"]) == ("online", 0)
    states = [what for what, _ in farm.events(board="a") if what.startswith("board.")]
    assert states[-5:] == ["board.suspect", *["board.quarantined"] * 3, "board.online"]


def test_passed_job_counts_as_check(farm: Desk) -> None:
    farm.rows("update hil.boards set checked_at = now() - interval '5 h'")
    for result, fresh in ((JobResult(3, "COMPILE_ERROR"), False), (PASSED, True)):
        farm.submit()
        farm.report(farm.grant("a"), result)
        [row] = farm.rows("select checked_at > now() - interval '1 h' as fresh from hil.boards")
        assert row["fresh"] is fresh


def test_stale_board_runs_check_before_next_job(farm: Desk) -> None:
    farm.submit(2)
    farm.rows("update hil.boards set checked_at = now() - interval '7 h'")
    farm.report(farm.grant("a"), JobResult(3, "COMPILE_ERROR"))
    assert farm.grant("a").spec.kind is Kind.HEALTH
    farm.report(farm.grant("a"))
    assert farm.grant("a").spec.kind is Kind.RUN


def test_report_rejects_and_logs_ended_lease(farm: Desk) -> None:
    farm.online("b")
    [name] = farm.submit()
    late = farm.grant("a")
    farm.silence("a")
    farm.tick()
    assert farm.grant("b").job == name
    recorded, reason = farm.report(late, PASSED, worker="worker of a")
    assert (recorded, reason) == (False, "the lease has ended: no heartbeat from a for 500 s")
    assert farm.report(late, PASSED, worker="worker of a")[0] is False
    assert farm.jobs() == {name: "running"}
    assert any("ignored late result: PASS" in reason for what, reason in farm.events() if what == "lease.late_report")


@pytest.mark.parametrize(("lease", "worker"), [(0, "worker of a"), (10**15, "worker of a"), (None, "another")])
def test_report_rejects_other_workers(farm: Desk, lease: int | None, worker: str) -> None:
    [name] = farm.submit()
    lease = farm.grant("a").lease if lease is None else lease
    assert farm.report(lease, PASSED, worker=worker) == (False, "this lease was not granted to this worker")
    assert farm.jobs() == {name: "running"}


def test_next_fence_exceeds_reported_fence(farm: Desk) -> None:
    farm.submit(2)
    farm.report(farm.grant("a"), fence=1000)
    assert farm.grant("a").fence == 1001


@pytest.mark.parametrize("fence", [2**31, 2**62 - 1, 2**63, 2**64 - 1])
def test_report_stores_result_without_impossible_fence(farm: Desk, fence: int) -> None:
    [name] = farm.submit()
    before = farm.board("a")["fence"]
    assert farm.report(farm.grant("a"), fence=fence) == (True, "")
    assert farm.jobs() == {name: "done"} and farm.board("a")["fence"] == before
    assert any(f"invalid fence {fence}" in why for what, why in farm.events() if what == "board.fence")


def test_database_rejects_impossible_fence(farm: Desk) -> None:
    with pytest.raises(Exception, match="boards_fence_is_sane"):
        farm.rows("update hil.boards set fence = %s where name = 'a'", 2**62 - 1)
    # A fence can still follow the highest accepted one.
    farm.submit(2)
    farm.report(farm.grant("a"), fence=2**31 - 1)
    assert farm.grant("a").fence == 2**31


def test_beat_renews_board_and_known_leases(farm: Desk) -> None:
    farm.submit()
    lease = farm.grant("a").lease
    farm.silence("a")
    assert farm.beat("a", []) == leases.BeatReply(owner=True)
    late = "select from hil.leases where expires_at < now() and ended_at is null"
    assert len(farm.rows(late)) == 1
    assert farm.beat("a", [lease]) == leases.BeatReply(owner=True)
    assert farm.rows(late) == []
    assert farm.rows("select from hil.boards where owned_until < now() + interval '400 s'") == []


def test_beat_returns_ended_leases(farm: Desk) -> None:
    farm.submit()
    lease = farm.grant("a").lease
    farm.report(lease, JobResult(1, "FAIL", "differs"))
    assert farm.beat("a", [lease, 999]).over == {lease: "differs", 999: "unknown lease"}
    assert farm.beat("a", [lease], worker="another") == leases.BeatReply(
        owner=False, over={lease: "lease of a different worker"}
    )


def test_beats_of_many_boards_are_answered_together(farm: Desk) -> None:
    farm.online("b")
    said = [
        WorkerBeat("a", "worker of a"),
        WorkerBeat("b", "another"),
        WorkerBeat("a", "third"),
        WorkerBeat("unknown", "x"),
    ]
    assert [one.owner for one in farm.do(leases.process_beats, said, farm.settings)] == [True, False, False, False]
    farm.leave("b")
    assert farm.beat("b", worker="stands by") == leases.BeatReply(owner=False, vacant=True)


def test_beat_ignores_locks_of_other_transactions(farm: Desk) -> None:
    farm.submit()
    lease = farm.grant("a").lease

    async def beside_a_change() -> leases.BeatReply:
        async with farm.db.transaction() as tx, farm.db.transaction() as other:
            await tx.execute("update hil.leases set reason = 'changing' where id = %s", [lease])
            await tx.execute("update hil.boards set reason = 'changing' where name = 'a'")
            return (
                await asyncio.wait_for(
                    leases.process_beats(other, [WorkerBeat("a", "worker of a", [lease])], farm.settings), 60
                )
            )[0]

    assert farm.run(beside_a_change()) == leases.BeatReply(owner=True)


def test_started_accepts_first_call_of_lease_worker(farm: Desk) -> None:
    [name] = farm.submit()
    lease = farm.grant("a").lease
    farm.do(leases.record_start, lease, "another", "unix:/x")
    assert farm.lease(lease)["started_at"] is None
    for direct in ("unix:/a", "unix:/b"):
        farm.do(leases.record_start, lease, "worker of a", direct)
    assert farm.lease(lease)["direct"] == "unix:/a"
    assert [what for what, _ in farm.events(job=name)] == ["job.queued", "job.granted", "lease.started"]
    assert farm.rows("select from hil.jobs where started_at is null and checks is null") == []


@pytest.fixture
def held(farm: Desk) -> dict[str, Any]:
    """Return a lease with a holder."""
    farm.submit(kind=Kind.LEASE)
    lease = farm.lease(farm.grant("a").lease)
    farm.started(lease["id"], "unix:/a")
    return lease


def test_holding_describes_active_lease(farm: Desk, held: dict[str, Any]) -> None:
    holding = farm.do(leases.read_holding, held["id"])
    assert holding is not None
    assert (holding.card.name, holding.key, holding.direct, holding.started) == ("a", held["key"], "unix:/a", True)
    assert len(held["key"]) > 20
    assert farm.do(leases.lease_of_job, held["job"]) == held["id"]
    farm.release(held["id"], held["key"])
    assert farm.do(leases.read_holding, held["id"]) is None
    assert farm.do(leases.lease_of_job, held["job"]) is None
    assert farm.do(leases.read_grant, held["id"], farm.settings) is None


def test_renew_holder_requires_key_of_active_lease(farm: Desk, held: dict[str, Any]) -> None:
    farm.rows("update hil.leases set holder_until = now() - interval '1 s' where id = %s", held["id"])
    assert farm.do(leases.renew_holder, held["id"], "wrong", farm.settings) is False
    assert farm.do(leases.renew_holder, held["id"], held["key"], farm.settings) is True
    assert farm.tick() == 0
    farm.release(held["id"], held["key"])
    assert farm.do(leases.renew_holder, held["id"], held["key"], farm.settings) is False


def test_release_requires_key_and_frees_board(farm: Desk, held: dict[str, Any]) -> None:
    [after] = farm.submit()
    with pytest.raises(AccessRefused, match="key"):
        farm.release(held["id"], "wrong")
    farm.release(held["id"], held["key"], "the command ended")
    farm.release(held["id"], held["key"])
    assert farm.grant("a").job == after
    [row] = farm.rows("select * from hil.results where job = %s", held["job"])
    assert (row["exit_code"], row["result"]["reason"]) == (0, "the command ended")


def test_release_rejects_jobs_other_than_leases(farm: Desk) -> None:
    farm.submit()
    with pytest.raises(AccessRefused):
        farm.release(farm.grant("a").lease, "")


def test_board_failure_ends_held_lease(farm: Desk, held: dict[str, Any]) -> None:
    farm.online("b")
    farm.report(held["id"], BROKEN)
    [row] = farm.rows("select * from hil.results where job = %s", held["job"])
    assert (row["exit_code"], row["outcome"]) == (4, "BOARD_LOST")
    assert [grant.spec.kind for grant in farm.grants()] == [Kind.HEALTH]

"""Test that free boards and waiting jobs are matched in the transaction that makes a match possible."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from support.farm_desks import ADMIN, ANNA, BERT, BROKEN, PASSED, Desk

from hil.controller.farm.leasing import allocator, leases, submissions
from hil.controller.farm.messages import JobResult, JobSpec, Kind, Submission
from hil.controller.farm.scheduler import policy
from hil.controller.farm.scheduler.candidates import WaitingJob
from hil.controller.farm.store import records


@pytest.mark.ci
def test_allocator_grants_free_board_immediately(desk: Desk) -> None:
    desk.online("a")
    [name] = desk.submit(selector="name=a")
    grant = desk.grant("a")
    assert (grant.job, grant.attempt, grant.user, grant.ttl_s) == (name, 1, "anna", desk.settings.lease_s)
    assert desk.jobs() == {name: "running"}
    assert desk.fetched("a", "b") == [grant.lease]


def test_allocator_grants_returned_board_in_same_transaction(desk: Desk) -> None:
    desk.online("a")
    first, second = desk.submit(2)
    before = desk.grant("a")
    desk.report(before)
    after = desk.grant("a")
    assert (before.job, after.job) == (first, second)
    assert after.fence == before.fence + 1
    assert desk.fetched("a") == [after.lease]


def test_allocator_prefers_higher_priority(desk: Desk) -> None:
    desk.online("a")
    desk.submit()
    _, [high] = desk.submit(priority="normal"), desk.submit(priority="high")
    desk.report(desk.grant("a"))
    assert desk.grant("a").job == high


def test_allocator_alternates_between_users(desk: Desk) -> None:
    desk.online("a")
    desk.submit(4, ANNA)
    [berts] = desk.submit(1, BERT)
    desk.report(desk.grant("a"))
    assert desk.grant("a").job == berts


@pytest.mark.ci
@pytest.mark.parametrize("state", ["suspect", "quarantined", "offline"])
def test_allocator_grants_only_online_boards(desk: Desk, state: str) -> None:
    desk.online("a")
    desk.rows("update hil.boards set state = %s, check_at = now() + interval '1 h' where name = 'a'", state)
    assert desk.jobs() == {}
    [name] = desk.submit()
    desk.tick()
    assert desk.jobs() == {name: "queued"}


def test_allocator_skips_boards_of_silent_workers(desk: Desk) -> None:
    desk.online("a")
    desk.silence("a")
    [name] = desk.submit()
    assert desk.jobs() == {name: "queued"}


def test_allocator_checks_stale_board_before_next_job(desk: Desk) -> None:
    desk.online("a")
    desk.rows("update hil.boards set checked_at = now() - interval '7 h'")
    [name] = desk.submit()
    assert desk.jobs() == {name: "queued"}
    desk.tick()
    desk.report(desk.grant("a"))  # the health check
    assert desk.grant("a").job == name


def test_allocator_prefers_warm_board(desk: Desk) -> None:
    desk.online("a", "b", "c")
    warm = (JobSpec(Kind.RUN, affinity="digest of a model"),)
    desk.rows("update hil.boards set warm = '{digest of a model}' where name = 'b'")
    desk.submit(specs=warm)
    assert [grant.board for grant in desk.grants()] == ["b"]


def test_board_lists_recent_programs_newest_first(desk: Desk) -> None:
    desk.online("a")
    for affinity in ("x", "y", "x"):
        desk.submit(specs=(JobSpec(Kind.RUN, affinity=affinity),))
        desk.report(desk.grant("a"))
    assert desk.board("a")["warm"] == ["x", "y"]


@pytest.mark.parametrize(
    ("result", "why"),
    [(BROKEN, BROKEN.reason), (JobResult(4, infrastructure=True), "infrastructure failure")],
)
def test_event_records_reason_of_retry(desk: Desk, result: JobResult, why: str) -> None:
    desk.online("a")
    [name] = desk.submit()
    desk.report(desk.grant("a"), result)
    assert ("job.again", why) in desk.events(job=name)


@pytest.mark.ci
def test_allocator_avoids_failed_board_if_another_matches(desk: Desk) -> None:
    desk.online("a", "b")
    desk.submit(board="b", timeout_s=50)
    [name] = desk.submit()
    desk.report(desk.grant("a"), BROKEN)
    desk.report(desk.grant("a"))  # the health check
    assert desk.jobs()[name] == "queued"
    desk.report(desk.grant("b"))
    assert (desk.grant("b").job, desk.grant("b").attempt) == (name, 2)


@pytest.mark.ci
def test_allocator_reuses_failed_board_when_only_choice(desk: Desk) -> None:
    desk.online("a", "b")
    desk.drain("b")
    [name] = desk.submit()
    desk.report(desk.grant("a"), BROKEN)
    desk.report(desk.grant("a"))  # the health check
    assert (desk.grant("a").job, desk.grant("a").attempt) == (name, 2)


def test_allocator_uses_updated_board_labels(desk: Desk) -> None:
    desk.online("a", labels={"runtimes": ["iree"]})
    desk.attend("a", labels={"runtimes": ["iree", "tflite"]})
    desk.submit(selector="runtimes=tflite")
    assert desk.grant("a").spec.kind is Kind.RUN


def test_allocator_reads_only_front_of_long_queue(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.online("a")
    desk.submit(300)
    asked: list[int] = []
    assign = policy.assign

    def counted(waiting: Sequence[WaitingJob], *others: Any) -> list[tuple[int, str]]:
        asked.append(len(waiting))
        return assign(waiting, *others)

    monkeypatch.setattr(allocator.policy, "assign", counted)
    desk.report(desk.grant("a"))
    assert desk.grant("a")
    assert [one for one in asked if not 1 <= one < 30] == []


def test_allocator_skips_jobs_without_matching_free_board(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.online("a", "b", labels={"chip": "a53"})
    desk.drain("b")
    desk.submit(100, selector="name=b")
    asked: list[int] = []
    monkeypatch.setattr(allocator.policy, "assign", lambda waiting, *others: asked.append(len(waiting)) or [])
    desk.tick()
    assert asked == []


def test_allocator_caches_parsed_labels(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.online("a")
    monkeypatch.setattr(records, "_labels", {})
    desk.submit()
    known = records._labels
    assert [labels["name"] for labels in known.values()] == ["a"]
    before = next(iter(known.values()))
    desk.tick()
    assert next(iter(known.values())) is before


@pytest.mark.ci
def test_concurrent_grants_never_share_board(desk: Desk) -> None:
    desk.online("a", "b", "c")

    async def submit(number: int) -> None:
        async with desk.db.transaction() as tx:
            who = (ANNA, BERT, ADMIN)[number % 3]
            await submissions.submit(
                tx, desk.queue, who, Submission(f"job {number}", (JobSpec(Kind.RUN),)), "", desk.settings
            )

    async def work(board: str) -> None:
        for _ in range(10):
            async with desk.db.transaction() as tx:
                asked = "select id, worker from hil.leases where board = %s and ended_at is null"
                active = await (await tx.execute(asked, [board])).fetchall()
            for row in active:
                async with desk.db.transaction() as tx:
                    said = await leases.report(tx, desk.queue, row["id"], row["worker"], PASSED, 0, desk.settings)
                    assert said == (True, "")

    async def all_at_once() -> None:
        await asyncio.gather(*[submit(number) for number in range(20)], *[work(board) for board in "abc"])
        while await waiting():
            await asyncio.gather(*[work(board) for board in "abc"])

    async def waiting() -> int:
        async with desk.db.transaction() as tx:
            rows = await (await tx.execute("select count(*) as n from hil.jobs where finished_at is null")).fetchall()
            return int(rows[0]["n"])

    desk.run(all_at_once())
    assert set(desk.jobs().values()) == {"done"}
    assert len(desk.jobs()) == 20
    overlapping = desk.rows(
        "select from hil.leases as one join hil.leases as two on one.board = two.board and one.fence < two.fence"
        " where one.ended_at > two.granted_at"
    )
    assert overlapping == []

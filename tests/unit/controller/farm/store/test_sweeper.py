"""Test the effects of elapsed time."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from support.farm_desks import ANNA, LONG_AGO, PASSED, Desk, open_desk

from hil.controller.farm.database.database import Database, DatabaseAway, Tx, end_tasks
from hil.controller.farm.gateway.server import SweepTimer
from hil.controller.farm.leasing import leases, submissions, sweeper
from hil.controller.farm.messages import PROBE_SECONDS, JobSpec, Kind, Submission
from hil.controller.farm.store import queries
from hil.controller.farm.store.queries import unrunnable
from hil.controller.farm.store.records import fetch_rows, serialize_calls


@pytest.fixture
def desk(desk: Desk) -> Desk:
    desk.online("a", "b")
    return desk


def test_tick_leaves_healthy_farm_unchanged(desk: Desk) -> None:
    desk.submit()
    assert desk.tick() == 0


def test_tick_moves_job_from_silent_board(desk: Desk) -> None:
    [name] = desk.submit()
    before = desk.grant("a")
    desk.silence("a")
    assert desk.tick() > 0
    assert (desk.grant("b").job, desk.grant("b").attempt) == (name, 2)
    assert desk.lease(before.lease)["reason"] == "no heartbeat from a for 500 s"
    assert desk.board("a")["state"] == "offline"
    assert ("board.offline", "no heartbeat from the host for 500 s") in desk.events(board="a")


def test_tick_marks_board_of_silent_lease_suspect(desk: Desk) -> None:
    desk.submit()
    desk.rows("update hil.leases set expires_at = now() - interval '1 s' where board = 'a'")
    desk.tick()
    assert desk.board("a")["state"] == "suspect"
    assert desk.grant("a").spec.kind is Kind.HEALTH


def test_tick_ends_lost_job_after_last_attempt(desk: Desk) -> None:
    [name] = desk.submit(max_attempts=1)
    desk.silence("a")
    desk.tick()
    assert (desk.jobs()[name], desk.result(name)["exit_code"]) == ("done", 4)


def test_tick_spares_leases_after_gateway_start(desk: Desk) -> None:
    [name] = desk.submit(kind=Kind.LEASE)
    desk.silence("a")
    desk.rows("update hil.leases set holder_until = now() - interval '1 s'")
    assert desk.tick(heard_since=time.monotonic() - desk.settings.lease_s + 100) == 0
    assert desk.jobs() == {name: "running"}
    assert desk.tick(heard_since=time.monotonic() - desk.settings.lease_s - 1) > 0


def test_tick_ends_job_after_time_limit(desk: Desk) -> None:
    [name] = desk.submit(timeout_s=5, max_attempts=3)
    [row] = desk.rows(
        "select extract(epoch from until - granted_at)::float as s from hil.leases where ended_at is null"
    )
    # includes time for a check of the board and for the report
    assert row["s"] == pytest.approx(5 + PROBE_SECONDS + 10, abs=0.1)
    lease = desk.grant("a").lease
    desk.rows("update hil.leases set until = now() - interval '1 ms' where id = %s", lease)
    desk.tick()
    result = desk.result(name)
    assert (result["exit_code"], result["outcome"]) == (3, "TIMEOUT")
    assert "time limit" in desk.beat("a", [lease]).over[lease]
    # The job may still hang on the board.
    assert desk.grant("a").spec.kind is Kind.HEALTH


def test_tick_accepts_late_report_after_gateway_start(desk: Desk) -> None:
    [name] = desk.submit(timeout_s=5)
    lease = desk.grant("a").lease
    desk.rows("update hil.leases set until = now() - interval '1 min' where id = %s", lease)
    desk.tick(heard_since=time.monotonic())
    assert desk.report(lease) == (True, "")
    assert desk.result(name)["outcome"] == "PASS"


def test_tick_respects_concurrent_beat(desk: Desk) -> None:
    desk.silence("a")

    async def both() -> int:
        async with desk.db.transaction() as tx:
            await leases.process_beats(tx, [leases.WorkerBeat("a", "worker of a", [])], desk.settings)
            clock = asyncio.create_task(tick())
            await asyncio.sleep(0.2)
        return await clock

    async def tick() -> int:
        async with desk.db.transaction() as tx:
            return await sweeper.run_periodic_work(tx, desk.queue, desk.settings, LONG_AGO)

    assert desk.run(both()) == 0
    assert desk.board("a")["state"] == "online"


@pytest.mark.parametrize(
    ("column", "why"), [("until", "time limit reached"), ("holder_until", "no heartbeat from the lease holder")]
)
def test_tick_ends_lease_without_holder_or_after_limit(desk: Desk, column: str, why: str) -> None:
    [name] = desk.submit(kind=Kind.LEASE)
    desk.rows(f"update hil.leases set {column} = now() - interval '1 s' where board = 'a'")
    desk.tick()
    assert (desk.jobs()[name], desk.result(name)["exit_code"]) == ("done", 0)
    assert why in desk.result(name)["result"]["reason"]
    assert desk.board("a")["state"] == "online"


def test_tick_fails_check_after_time_limit(desk: Desk) -> None:
    desk.attend("c")
    desk.rows("update hil.leases set until = now() - interval '1 s' where board = 'c'")
    desk.tick()
    assert (desk.board("c")["state"], desk.board("c")["failures"]) == ("quarantined", 1)


def test_tick_checks_idle_boards(desk: Desk) -> None:
    desk.rows("update hil.boards set checked_at = now() - interval '7 h' where name = 'b'")
    desk.tick()
    assert [(grant.board, grant.spec.kind) for grant in desk.grants()] == [("b", Kind.HEALTH)]
    assert ("board.suspect", "health check overdue") in desk.events(board="b")
    assert desk.tick() == 0


def test_tick_repeats_cancelled_check(desk: Desk) -> None:
    desk.rows("update hil.boards set checked_at = now() - interval '7 h' where name = 'b'")
    desk.tick()
    first = desk.grant("b")
    desk.cancel(first.job)
    desk.tick()
    assert desk.grant("b").spec.kind is Kind.HEALTH
    assert desk.grant("b").lease != first.lease


@pytest.mark.ci
def test_frozen_gateway_releases_sole_sweeper_lock(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper, "_FROZEN_SECONDS", 0.3)
    desk.silence("a")

    @serialize_calls
    async def freeze(tx: Tx) -> None:
        await fetch_rows(tx, "select 1 as one")
        await asyncio.sleep(1)
        async with desk.db.transaction() as other:
            assert await sweeper.run_periodic_work(other, desk.queue, desk.settings, LONG_AGO) > 0
        await fetch_rows(tx, "select 1 as one")

    async def frozen() -> None:
        async with desk.db.transaction() as tx:
            await freeze(tx)

    with pytest.raises(DatabaseAway):
        desk.run(frozen())
    assert desk.board("a")["state"] == "offline"


@pytest.mark.ci
def test_frozen_gateway_releases_leases_while_writing_beats(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper, "_FROZEN_SECONDS", 0.3)
    desk.submit()
    held = desk.grant("a")

    async def frozen() -> None:
        async with desk.db.transaction() as tx, tx.pipeline():
            await leases.process_beats(tx, [leases.WorkerBeat("a", "worker of a", [held.lease])], desk.settings)
            await asyncio.sleep(1)
            async with desk.db.transaction() as other:
                await sweeper.run_periodic_work(other, desk.queue, desk.settings, LONG_AGO)
            async with desk.db.transaction() as other:
                said = leases.report(other, desk.queue, held.lease, "worker of a", PASSED, 0, desk.settings)
                assert await asyncio.wait_for(said, 60) == (True, "")
            await fetch_rows(tx, "select 1 as one")

    with pytest.raises(DatabaseAway):
        desk.run(frozen())


@pytest.mark.ci
def test_thaw_spares_active_old_transaction(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction may be old; its gateway's last query counts."""
    monkeypatch.setattr(sweeper, "_FROZEN_SECONDS", 2.5)

    @serialize_calls
    async def slow(tx: Tx) -> None:
        for _ in range(6):
            await asyncio.sleep(0.5)
            await fetch_rows(tx, "select 1 as one")
        async with desk.db.transaction() as other:
            await sweeper.terminate_frozen(other)
        await fetch_rows(tx, "select 1 as one")

    desk.do(slow)


@pytest.mark.ci
def test_farm_recovers_when_all_connections_wait(farm_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer has no free connection, but the farm must recover."""
    monkeypatch.setattr(sweeper, "_FROZEN_SECONDS", 1.0)
    with open_desk(farm_db) as desk:
        desk.online("a")

        async def main() -> None:
            other = await Database.open(farm_db, patience_s=2.0)
            parts = SimpleNamespace(settings=desk.settings, db=other, queue=desk.queue, dispatch=Mock(), metrics=Mock())

            @serialize_calls
            async def hold(tx: Tx) -> None:
                await fetch_rows(tx, "select 1 as one")
                await asyncio.sleep(60)

            async def freeze() -> None:
                async with desk.db.transaction() as tx:
                    await hold(tx)

            async def order(number: int) -> None:
                async with other.transaction() as tx:
                    waiting = Submission(f"{number}", (JobSpec(Kind.RUN),))
                    await submissions.submit(tx, desk.queue, ANNA, waiting, "", desk.settings)

            frozen = asyncio.create_task(freeze())
            await asyncio.sleep(0.3)
            orders = [asyncio.create_task(order(number)) for number in range(other.pool.max_size)]
            await asyncio.sleep(0.3)
            clock = asyncio.create_task(SweepTimer(parts).run())
            try:
                await asyncio.wait_for(asyncio.gather(*orders), 30)
            finally:
                await end_tasks(frozen, clock)
                await other.close()

        desk.run(main())
        assert len(desk.jobs()) == 16


def test_tick_runs_in_single_gateway(desk: Desk) -> None:
    desk.silence("a")

    async def both() -> tuple[int, int]:
        async with desk.db.transaction() as one, desk.db.transaction() as other:
            first = await sweeper.run_periodic_work(one, desk.queue, desk.settings, LONG_AGO)
            return first, await sweeper.run_periodic_work(other, desk.queue, desk.settings, LONG_AGO)

    first, second = desk.run(both())
    assert first > 0
    assert second == 0


def test_lost_checks_quarantine_board_and_block_jobs(desk: Desk) -> None:
    [name] = desk.submit(board="a")

    def let_go() -> None:
        """Expire the lease of a worker that beats but ignores its grants."""
        desk.rows("update hil.leases set expires_at = now() - interval '1 s' where board = 'a'")
        desk.tick()

    let_go()
    for lost in range(3):
        assert (desk.board("a")["state"], desk.board("a")["failures"]) == ("suspect", lost)
        assert desk.grant("a").spec.kind is Kind.HEALTH and not desk.do(hopeless, name)
        let_go()
    board = desk.board("a")
    assert (board["state"], board["failures"]) == ("quarantined", 3)
    assert "failed 3 times in a row" in board["reason"]
    assert desk.do(hopeless, name) == f"a: {board['reason']}" and desk.jobs()[name] == "queued"
    desk.drain("b")
    [either] = desk.submit()
    assert desk.do(hopeless, either)
    desk.online("c")
    assert not desk.do(hopeless, either)
    desk.resume("a")
    assert not desk.do(hopeless, name)


async def hopeless(tx: Tx, name: str) -> str:
    return (await unrunnable(tx, [await queries.job(tx, name)])).get(name, "")

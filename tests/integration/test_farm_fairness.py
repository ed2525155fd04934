"""Fair scheduling: whole queues, processed by boards that take no time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from support.farm_desks import ANNA, BERT, PASSED, Desk, open_desk

from hil.controller.farm.leasing import leases, submissions
from hil.controller.farm.messages import JobSpec, Kind, Principal, Priority, Role, Submission

BOARDS = ("a", "b", "c", "d")
CARL = Principal("carl", Role.SUBMITTER, "robots")


NEVER = 1e9


@pytest.fixture
def farm(farm_db: str, request: pytest.FixtureRequest) -> Iterator[Desk]:
    """Provide a farm with four boards, by default without aging."""
    with open_desk(farm_db, aging_s=getattr(request, "param", NEVER)) as desk:
        desk.online(*BOARDS)
        yield desk


class Workers:
    """Simulate gateway and board workers until the queue is empty."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.ended: list[str] = []

    def work_off(self, beside: Callable[[int], Submission | None] = lambda number: None) -> None:
        """Run all queued jobs. ``beside`` may submit another job after each finished job."""
        self._desk.run(asyncio.wait_for(self._all(beside), 280))

    async def _all(self, beside: Callable[[int], Submission | None]) -> None:
        await asyncio.gather(*[self._one(board, beside) for board in BOARDS])

    async def _one(self, board: str, beside: Callable[[int], Submission | None]) -> None:
        desk = self._desk
        while lease := await desk.queue.fetch([board]):
            async with desk.db.transaction() as tx:
                [grant] = await leases.read_grants(tx, lease, desk.settings)
            self.ended.append(grant.user)
            async with desk.db.transaction() as tx:
                worker = f"worker of {board}"
                said = await leases.report(tx, desk.queue, grant.lease, worker, PASSED, 0, desk.settings)
            assert said == (True, "")
            if order := beside(len(self.ended)):
                async with desk.db.transaction() as tx:
                    await submissions.submit(tx, desk.queue, CARL, order, "", desk.settings)


@pytest.mark.slow
def test_small_queue_does_not_wait_for_large_queue(farm: Desk) -> None:
    many, few = farm.submit(300, ANNA), farm.submit(20, BERT)
    workers = Workers(farm)
    workers.work_off()
    assert set(farm.jobs().values()) == {"done"}
    assert Counter(workers.ended) == {"anna": len(many), "bert": len(few)}
    last = len(workers.ended) - workers.ended[::-1].index("bert")
    # The users took turns: when bert's last job started, anna had had about as many boards.
    assert workers.ended[:last].count("anna") <= len(few) + 2 * len(BOARDS)
    # anna's jobs did not wait either.
    assert workers.ended[:last].count("anna") >= len(few) - 2 * len(BOARDS)


def test_scheduler_prefers_user_with_less_board_time(farm: Desk) -> None:
    for board in BOARDS[1:]:
        farm.drain(board)
    farm.submit(40, ANNA)
    Workers(farm).work_off()
    workers = Workers(farm)
    # Short jobs still count for a large share here.
    farm.rows("update hil.shares set board_s = board_s + 60 where user_name = 'anna'")
    farm.submit(10, ANNA), farm.submit(10, BERT)
    workers.work_off()
    # Anna got the free board first; from then on her recent use counts.
    assert workers.ended == ["anna", *["bert"] * 10, *["anna"] * 9]


@pytest.mark.slow
@pytest.mark.parametrize(("farm", "starves"), [(1.0, False), (NEVER, True)], indirect=["farm"], ids=["aging", "none"])
def test_aging_prevents_starvation_of_low_priority_jobs(farm: Desk, starves: bool) -> None:
    farm.submit(len(BOARDS) * 2, CARL, priority="high")
    farm.submit(3, ANNA, priority="low")
    workers = Workers(farm)
    longest = 300 if starves else 20_000

    def stream(number: int) -> Submission | None:
        """Submit a high-priority job per finished job until anna's jobs are done."""
        more = workers.ended.count("anna") < 3 and number < longest
        return Submission(f"high {number}", (JobSpec(Kind.RUN),), priority=Priority.HIGH) if more else None

    workers.work_off(stream)
    assert Counter(workers.ended)["anna"] == 3
    if starves:
        assert "anna" not in workers.ended[:longest]
    else:
        assert len(workers.ended) < longest


def test_suite_jobs_use_all_boards(farm: Desk) -> None:
    farm.submit(80)
    Workers(farm).work_off()
    shares = farm.rows(
        "select lease.board, count(*) as n from hil.leases as lease join hil.jobs as job on job.id = lease.job"
        " where job.checks is null group by lease.board"
    )
    assert {row["board"] for row in shares} == set(BOARDS)
    assert sum(row["n"] for row in shares) == 80

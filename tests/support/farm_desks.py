"""Farm functions without a gateway, on a real database. Each call uses a separate transaction."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from hil.controller.farm.database.database import Database, Tx
from hil.controller.farm.leasing import boards, leases, submissions, sweeper
from hil.controller.farm.leasing.lease_queue import LeaseQueue
from hil.controller.farm.messages import (
    BoardCard,
    BoardState,
    Grant,
    JobResult,
    JobSpec,
    Kind,
    Principal,
    Role,
    Submission,
)
from hil.controller.farm.settings import FarmSettings

P = ParamSpec("P")
T = TypeVar("T")

ANNA, BERT = Principal("anna", Role.SUBMITTER, "vision"), Principal("bert", Role.SUBMITTER, "speech")
ADMIN = Principal("root", Role.ADMIN)
# For a gateway that has received messages from all workers for a long time.
LONG_AGO = -1e9
PASSED = JobResult(0, "PASS", board_ns=(1, 2))
BROKEN = JobResult(4, "BOARD_LOST", "the board stopped answering", infrastructure=True)


class Desk:
    """Call the functions of the farm as a gateway does. Created by :func:`open_desk`."""

    def __init__(self, url: str, settings: FarmSettings) -> None:
        self.settings = settings
        self._loop = asyncio.new_event_loop()
        self.db = self._loop.run_until_complete(Database.open(url))
        self.queue = LeaseQueue(self.db)
        self._loop.run_until_complete(self.queue.open())
        self._numbers = itertools.count(1)

    def close(self) -> None:
        self._loop.run_until_complete(self.queue.close())
        self._loop.run_until_complete(self.db.close())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def number(self) -> int:
        """Return a different number on each call."""
        return next(self._numbers)

    def run(self, coroutine: Awaitable[T]) -> T:
        async def as_coroutine() -> T:
            return await coroutine

        return self._loop.run_until_complete(as_coroutine())

    def do(self, function: Callable[Concatenate[Tx, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        async def transacted() -> T:
            async with self.db.transaction() as tx:
                return await function(tx, *args, **kwargs)

        return self.run(transacted())

    def rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        async def read(tx: Tx) -> list[dict[str, Any]]:
            cursor = await tx.execute(query, values)
            return await cursor.fetchall() if cursor.description is not None else []

        return self.do(read)

    def submit(self, count: int = 1, who: Principal = ANNA, kind: Kind = Kind.RUN, **order: Any) -> list[str]:
        specs = order.pop("specs", (JobSpec(kind),) * count)
        order = {"title": "a job", "specs": specs, **order}
        return self.do(submissions.submit, self.queue, who, Submission(**order), "", self.settings).jobs

    def cancel(self, name: str, who: Principal = ADMIN) -> list[str]:
        return self.do(submissions.cancel, self.queue, who, name, self.settings)

    def attend(
        self, board: str, worker: str = "", held: Sequence[int] = (), *, host: str = "h", **card: Any
    ) -> boards.AttendReply:
        presented = BoardCard(board, host=host, **card)
        return self.do(boards.attach_worker, self.queue, presented, worker or f"worker of {board}", held, self.settings)

    def leave(self, board: str, worker: str = "") -> None:
        self.do(boards.leave, self.queue, board, worker or f"worker of {board}", self.settings)

    def online(self, *names: str, **card: Any) -> None:
        """Attach boards, and report them as healthy."""
        for name in names:
            self.attend(name, **card)
            self.report(self.grant(name))
            assert self.board(name)["state"] == BoardState.ONLINE.value

    def beat(self, board: str, held: Sequence[int] = (), worker: str = "") -> leases.BeatReply:
        said = leases.WorkerBeat(board, worker or f"worker of {board}", held)
        return self.do(leases.process_beats, [said], self.settings)[0]

    def beat_all(self) -> None:
        for row in self.rows("select name, worker from hil.boards where worker <> ''"):
            held = [one.lease for one in self.grants() if one.board == row["name"]]
            self.beat(row["name"], held, row["worker"])

    def started(self, lease: int, direct: str = "") -> None:
        self.do(leases.record_start, lease, self.lease(lease)["worker"], direct)

    def report(
        self, grant: Grant | int, result: JobResult = PASSED, *, fence: int = 0, worker: str = ""
    ) -> tuple[bool, str]:
        lease = grant if isinstance(grant, int) else grant.lease
        worker = worker or self.lease(lease)["worker"]
        return self.do(leases.report, self.queue, lease, worker, result, fence, self.settings)

    def release(self, lease: int, key: str, reason: str = "released") -> None:
        self.do(leases.release, self.queue, lease, key, reason, self.settings)

    def drain(self, board: str, reason: str = "") -> None:
        self.do(boards.drain_board, ADMIN, board, reason)

    def resume(self, board: str) -> None:
        self.do(boards.resume, self.queue, ADMIN, board, self.settings)

    def forget(self, board: str) -> list[str]:
        return self.do(boards.forget, ADMIN, board, self.settings)

    def forget_absent(self, absent_s: float) -> list[str]:
        return self.do(boards.forget_absent, absent_s, self.settings)

    def tick(self, heard_since: float = LONG_AGO) -> int:
        return self.do(sweeper.run_periodic_work, self.queue, self.settings, heard_since)

    def silence(self, board: str) -> None:
        """Simulate a worker that has sent nothing for so long that its lease ends."""
        self.rows("update hil.boards set owned_until = now() - interval '1 s' where name = %s", board)
        self.rows("update hil.leases set expires_at = now() - interval '1 s' where board = %s", board)

    def grants(self) -> list[Grant]:
        found = [row["id"] for row in self.rows("select id from hil.leases where ended_at is null order by id")]
        return self.do(leases.read_grants, found, self.settings)

    def grant(self, board: str) -> Grant:
        [found] = [one for one in self.grants() if one.board == board]
        return found

    def board(self, name: str) -> dict[str, Any]:
        [row] = self.rows("select * from hil.boards where name = %s", name)
        return row

    def lease(self, lease: int) -> dict[str, Any]:
        [row] = self.rows("select * from hil.leases where id = %s", lease)
        return row

    def jobs(self) -> dict[str, str]:
        """Return the state of each job by name, without health checks."""
        rows = self.rows(
            "select case jobs when 1 then submission.id::text else submission.id || '.' || number end as name, state"
            " from hil.jobs as job join hil.submissions as submission on submission.id = submission"
            " where checks is null order by job.id"
        )
        return {row["name"]: row["state"] for row in rows}

    def result(self, name: str) -> dict[str, Any]:
        submission, _, number = name.partition(".")
        [row] = self.rows(
            "select result.* from hil.results as result join hil.jobs as job on job.id = result.job"
            " where submission = %s and number = %s",
            int(submission),
            int(number or 1),
        )
        return row

    def events(self, **of: str) -> list[tuple[str, str]]:
        rows = self.rows("select * from hil.events order by id")
        return [(row["what"], row["reason"]) for row in rows if all(row[key] == value for key, value in of.items())]

    def fetched(self, *names: str) -> list[int]:
        return self.run(self.queue.fetch(names))


@contextmanager
def open_desk(url: str, **settings: float) -> Iterator[Desk]:
    # Longer than any test takes: only the tests advance the time.
    desk = Desk(url, FarmSettings(**{"lease_s": 500, "owner_s": 500, **settings}))
    try:
        yield desk
    finally:
        desk.close()

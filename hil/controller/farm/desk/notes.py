"""Every change leaves a row in the events, and is told to whoever listens once the transaction is committed."""

from __future__ import annotations

from collections.abc import Sequence

from hil.controller.farm.desk.changes import tell
from hil.controller.farm.desk.database import Tx
from hil.controller.farm.desk.rows import JobRow, LeaseRow, Row
from hil.controller.farm.words import JobState, job_name

_EVENT = "insert into hil.events (what, board, job, lease, reason) values (%s, %s, %s, %s, %s)"


async def note_board(tx: Tx, what: str, board: str, reason: str = "") -> None:
    """A board has changed: ``what`` as in ``board.suspect``, and why."""
    await tx.execute(_EVENT, [f"board.{what}", board, "", None, reason])
    await tell(tx, {"kind": "board", "board": board})


async def note_queued(tx: Tx, submission: int, jobs: Sequence[int], reason: str = "") -> None:
    """New jobs wait, all told in one."""
    name = str(submission)
    change = {"kind": "job", "submission": submission, "job": jobs[0], "name": name, "state": JobState.QUEUED.value}
    await tx.execute(_EVENT, ["job.queued", "", name, None, reason])
    await tell(tx, change)


async def note_job(tx: Tx, what: str, job: JobRow, state: JobState, *, reason: str = "", board: str = "") -> None:
    """A job has changed: ``what`` as in ``job.done``."""
    change = {"kind": "job", "submission": job.submission, "job": job.id, "name": job.name, "state": state.value}
    await tx.execute(_EVENT, [f"job.{what}", board, job.name, None, reason])
    await tell(tx, change)


async def note_granted(tx: Tx, leases: Sequence[Row]) -> None:
    """Jobs have been given boards: rows with id and board, and the job with its number in its submission."""
    for row in leases:
        name = job_name(row["submission"], row["number"], row["jobs"])
        change = {"submission": row["submission"], "job": row["job"], "name": name}
        await tx.execute(_EVENT, ["job.granted", row["board"], name, row["id"], ""])
        await tell(tx, {"kind": "job", **change, "state": JobState.RUNNING.value})
        await tell(tx, {"kind": "board", "board": row["board"]})


async def note_lease(tx: Tx, what: str, lease: LeaseRow, reason: str = "") -> None:
    """Something of a lease that changes nothing else: ``what`` as in ``lease.late_report``."""
    await tx.execute(_EVENT, [f"lease.{what}", lease.board, lease.job.name, lease.id, reason])


async def note_ended(tx: Tx, lease: LeaseRow, reason: str) -> None:
    """A lease is over: its board's worker and its holder hear it."""
    await note_lease(tx, "ended", lease, reason)
    await tell(tx, {"kind": "ended", "lease": lease.id, "board": lease.board, "reason": reason})


async def note_started(tx: Tx, lease: LeaseRow) -> None:
    """The board has begun with a lease's job."""
    change = {"submission": lease.job.submission, "job": lease.job.id, "name": lease.job.name}
    await note_lease(tx, "started", lease)
    await tell(tx, {"kind": "started", "lease": lease.id})
    await tell(tx, {"kind": "job", **change, "state": JobState.RUNNING.value})

"""Orders: queued once however often they are sent, called off, put into another class."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hil.controller.farm.messages import (
    JobResult,
    JobState,
    Kind,
    Principal,
    Priority,
    Role,
    Submission,
    job_name,
    parse_job,
)
from hil.controller.farm.scheduler.policy import BoardRow, Waiting
from hil.controller.farm.selector import nearest, parse
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store import transitions
from hil.controller.farm.store.allocator import grant, grant_new
from hil.controller.farm.store.database import Tx
from hil.controller.farm.store.event_log import note_job
from hil.controller.farm.store.lease_queue import LeaseQueue
from hil.controller.farm.store.records import (
    JOBS,
    JobRow,
    active_leases,
    board_rows,
    fetched,
    job_rows,
    serialized,
    storable,
    stored,
)
from hil.controller.farm.store.transitions import enqueue, finish
from hil.errors import EXIT_INTERRUPTED, AccessRefused, FarmError, NoSuchBoard, UsageError, did_you_mean

_MOST_JOBS, _MOST_ATTEMPTS, _LONGEST_S = 100_000, 100, 30 * 86400.0
_LONGEST_PROJECT = 100
_TIMEOUTS = f"from a moment to {_LONGEST_S / 86400:.0f} days"

# Orders of one user that wait: each may be a lane of its own, which every granting looks at.
_MOST_WAITING = 1000
_MANY = "select count(*) as many from (select from hil.jobs where state = 'queued' limit %s) as waiting"
_WAITING = f"""
    select count(distinct job.submission) as waiting from {JOBS}
    where job.state = 'queued' and submission.user_name = %s
"""
_SENT = "select id, user_name, jobs from hil.submissions where key = %s"
_PRIORITY = """
    with changed as (update hil.submissions set priority = %(priority)s where id = %(submission)s returning *)
    update hil.jobs as job set lane = hil.lane(
        changed.user_name, changed.project, changed.priority, changed.selector, changed.board, job.checks, job.avoid)
    from changed where job.submission = changed.id and job.state = 'queued'
"""


@dataclass(frozen=True)
class Submitted:
    """An order in the queue: its number, and its jobs' names."""

    submission: int
    jobs: list[str]


@serialized
async def submit(
    tx: Tx, queue: LeaseQueue, who: Principal, order: Submission, trace: str, settings: FarmSettings
) -> Submitted:
    """Queue an order's jobs, all of them or none, and give them boards that are free.

    Raises:
        NoSuchBoard: no board of the farm can ever match.
        UsageError: the order makes no sense.
        AccessRefused: the project is not this user's.
        FarmError: too many of this user's orders wait already.
    """
    _check(order)
    order = replace(order, title=storable(order.title), specs=tuple(stored(spec) for spec in order.specs))
    project = _project(who, order)
    sent = await tx.execute(_SENT, [order.key])
    boards = await board_rows(tx, settings)
    for before in await sent.fetchall():
        if before["user_name"] != who.user:
            raise UsageError("somebody else has sent an order with this key", hint="a key is one order's own")
        return Submitted(before["id"], _names(before["id"], before["jobs"]))
    _satisfiable(order, boards)
    await _check_quota(tx, who)
    submission, jobs = await enqueue(tx, order, who.user, project, trace)
    lane = Waiting(
        0, who.user, project, order.priority, selector=order.selector, board=order.board, kind=order.specs[0].kind
    )
    await grant_new(tx, queue, settings, order, lane, jobs, boards)
    return Submitted(submission, _names(submission, len(jobs)))


@serialized
async def cancel(tx: Tx, queue: LeaseQueue, who: Principal, name: str, settings: FarmSettings) -> list[str]:
    """End a job, or all jobs of a submission; returns the names of those that had not ended."""
    submission, number = await _own(tx, who, name)
    result = JobResult(EXIT_INTERRUPTED, reason=f"cancelled by {who.user}")
    leases = {lease.job.id: lease for lease in await active_leases(tx, "submission.id = %(id)s", {"id": submission})}
    jobs = await _open_jobs(tx, submission, number)
    for job in jobs:
        if job.id in leases:
            await transitions.lease_over(tx, queue, leases[job.id], result, settings, JobState.CANCELLED)
        else:
            await finish(tx, job, result, state=JobState.CANCELLED)
    freed = [leases[job.id].board for job in jobs if job.id in leases]
    if freed:
        await grant(tx, queue, settings, freed)
    return [job.name for job in jobs]


@serialized
async def prioritise(tx: Tx, who: Principal, name: str, priority: Priority) -> list[str]:
    """Put a submission into another class; returns the names of its jobs that have not ended."""
    submission, _ = await _own(tx, who, name)
    jobs = await _open_jobs(tx, submission, None)
    if jobs:
        await tx.execute(_PRIORITY, {"priority": priority.value, "submission": submission})
    for job in jobs:
        await note_job(tx, "priority", job, job.state, reason=f"{priority.value}, by {who.user}")
    return [job.name for job in jobs]


def _names(submission: int, jobs: int) -> list[str]:
    return [job_name(submission, number, jobs) for number in range(1, jobs + 1)]


def _check(order: Submission) -> None:
    """Refuse an order that makes no sense, before anything of it is stored."""
    if not order.key:
        raise UsageError("the submission has no key")
    if not 1 <= len(order.specs) <= _MOST_JOBS:
        raise UsageError(f"an order has 1 to {_MOST_JOBS} jobs, not {len(order.specs)}")
    if not 0 < order.timeout_s <= _LONGEST_S:
        raise UsageError(f"a job's time limit is {_TIMEOUTS}, not {order.timeout_s} s")
    if not 1 <= order.max_attempts <= _MOST_ATTEMPTS:
        raise UsageError(f"a job is tried 1 to {_MOST_ATTEMPTS} times, not {order.max_attempts}")
    if len(order.project) > _LONGEST_PROJECT:
        raise UsageError(f"a project's name has at most {_LONGEST_PROJECT} characters")
    kinds = {spec.kind for spec in order.specs}
    if Kind.HEALTH in kinds:
        raise UsageError("the farm orders the checks of its boards itself", hint="hil farm resume BOARD asks for one")
    if Kind.LEASE in kinds and len(order.specs) > 1:
        raise UsageError("a board is held by an order of its own")
    parse(order.selector)


async def _check_quota(tx: Tx, who: Principal) -> None:
    """Refuse one more order where too many of a user's wait. They are counted only where that many jobs wait at all."""
    [all_] = await fetched(tx, _MANY, [_MOST_WAITING])
    if all_["many"] < _MOST_WAITING:
        return
    [own] = await fetched(tx, _WAITING, [who.user])
    if own["waiting"] >= _MOST_WAITING:
        raise FarmError(
            f"{_MOST_WAITING} orders of {who.user} wait already", hint="one order may have many jobs; or wait for some"
        )


def _project(who: Principal, order: Submission) -> str:
    """Whom an order is counted for, beside its user."""
    if order.project and order.project != who.project and who.role is not Role.ADMIN:
        raise AccessRefused(
            f"this token is not of the project {order.project!r}",
            hint=f"it is of {who.project!r}" if who.project else "it is of no project",
        )
    return order.project or who.project


def _satisfiable(order: Submission, known: Iterable[BoardRow]) -> None:
    """Refuse what no board that the farm ever knew could be, however it is now."""
    boards = {one.name: one.labels for one in known}
    selector = parse(order.selector)
    if order.board:
        if order.board not in boards:
            hint = did_you_mean(order.board, boards) + "hil farm boards lists those that it has"
            raise NoSuchBoard(f"the farm has no board {order.board!r}", hint=hint)
        boards = {order.board: boards[order.board]}
    if any(selector.matches(labels) for labels in boards.values()):
        return
    if not boards:
        raise NoSuchBoard("the farm has no boards yet", hint="hil farm host --site S presents a machine's boards")
    close = "; ".join(f"{name}: {', '.join(misses)}" for name, misses in nearest(selector, boards))
    raise NoSuchBoard(f"no board of the farm is {order.selector!r}", hint=f"nearest: {close}")


async def _own(tx: Tx, who: Principal, name: str) -> tuple[int, int | None]:
    """The submission, and the job's number in it, that a name stands for and this bearer may change."""
    submission, number = parse_job(name)
    where = "submission.id = %s and (%s::numeric is null or job.number = %s) limit 1"
    owners = await fetched(tx, f"select submission.user_name from {JOBS} where {where}", [submission, number, number])
    if not owners:
        raise UsageError(f"the farm has no job {name}", hint="hil farm status lists them")
    if owners[0]["user_name"] != who.user and who.role is not Role.ADMIN:
        raise AccessRefused(f"job {name} is {owners[0]['user_name']}'s", hint="an admin may change it too")
    return submission, number


async def _open_jobs(tx: Tx, submission: int, number: int | None) -> list[JobRow]:
    where = "job.submission = %s and (%s::numeric is null or job.number = %s) and job.state in ('queued', 'running')"
    return await job_rows(tx, where, [submission, number, number])

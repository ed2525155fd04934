"""How a lease ends, and what becomes of its job and of its board: the one place where that is decided."""

from __future__ import annotations

from collections.abc import Mapping

from hil.controller.farm.messages import JobResult, JobState, Kind
from hil.controller.farm.scheduler import health, policy
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store import board_health
from hil.controller.farm.store.database import Tx
from hil.controller.farm.store.event_log import note_board, note_ended
from hil.controller.farm.store.job_repo import finish, queue_again
from hil.controller.farm.store.lease_queue import LeaseQueue
from hil.controller.farm.store.records import LeaseRow, as_json
from hil.errors import EXIT_BOARD, EXIT_OK, EXIT_STAGE

_END = """
    update hil.leases set ended_at = clock_timestamp(), reason = %(reason)s, result = %(result)s where id = %(lease)s
"""
_SHARE = """
    insert into hil.shares as had (user_name, project, board_s)
    values (%(user)s, %(project)s, extract(epoch from clock_timestamp() - %(granted_at)s))
    on conflict (user_name, project) do update
    set board_s = hil.faded(had.board_s, had.at, %(half_life_s)s) + excluded.board_s, at = clock_timestamp()
"""
_WARM = """
    update hil.boards set warm = (array_prepend(%(affinity)s, array_remove(warm, %(affinity)s)))[:%(most)s]
    where name = %(board)s
"""
# So many programs a board is remembered to be warm for.
_WARM_MOST = 64


async def end(
    tx: Tx, queue: LeaseQueue, lease: LeaseRow, reason: str, settings: FarmSettings, result: JobResult | None = None
) -> None:
    """The lease is over: its board is free, what it took is counted, and all who have to do with it are told.

    Args:
        result: what its worker reported, where that is what ended it.
    """
    said = None if result is None else as_json(result.to_json())
    await tx.execute(_END, {"lease": lease.id, "reason": reason, "result": said})
    job = lease.job
    share: Mapping[str, object] = {"user": job.user, "project": job.project, "granted_at": lease.granted_at}
    await tx.execute(_SHARE, {**share, "half_life_s": settings.share_half_life_s})
    await queue.done(tx, lease.queue_id)
    await note_ended(tx, lease, reason)
    if lease.held_back:
        await note_board(tx, "maintenance", lease.board, "drained, and nothing runs on it any more")


async def lost(tx: Tx, queue: LeaseQueue, lease: LeaseRow, reason: str, settings: FarmSettings) -> None:
    """The farm lost a board during a lease: the job goes elsewhere, or that is its result."""
    await end(tx, queue, lease, reason, settings)
    await _decide(tx, lease, JobResult(EXIT_BOARD, "BOARD_LOST", reason, infrastructure=True))
    what = health.EventKind.CHECK_LOST if lease.job.kind is Kind.HEALTH else health.EventKind.INFRASTRUCTURE
    doubt = health.Event(what, f"job {lease.job.name} was lost on it: {reason}")
    await board_health.change(tx, lease.board, doubt, settings)


async def timed_out(tx: Tx, queue: LeaseQueue, lease: LeaseRow, settings: FarmSettings) -> None:
    """The lease's own time is over. For a job that is its result; who held a board has had what they asked for."""
    if lease.job.kind is Kind.LEASE:
        return await over(tx, queue, lease, "its time is over", settings)
    reason = "it took longer than its time limit"
    await end(tx, queue, lease, reason, settings)
    await _decide(tx, lease, JobResult(EXIT_STAGE, "TIMEOUT", reason))
    what = health.EventKind.UNHEALTHY if lease.job.kind is Kind.HEALTH else health.EventKind.INFRASTRUCTURE
    doubt = f"job {lease.job.name} outlived its time limit on it"
    await board_health.change(tx, lease.board, health.Event(what, doubt), settings)


async def over(tx: Tx, queue: LeaseQueue, lease: LeaseRow, reason: str, settings: FarmSettings) -> None:
    """A lease that somebody held has come to its end."""
    await end(tx, queue, lease, reason, settings)
    await finish(tx, lease.job, JobResult(EXIT_OK, reason=reason), lease.id)


async def reported(tx: Tx, queue: LeaseQueue, lease: LeaseRow, result: JobResult, settings: FarmSettings) -> None:
    """A board's worker said how its job ended."""
    await end(tx, queue, lease, result.reason or result.outcome, settings, result)
    await _decide(tx, lease, result)
    await _learn(tx, lease, result, settings)


async def _decide(tx: Tx, lease: LeaseRow, result: JobResult) -> None:
    """The job after an attempt: again, or over."""
    job = lease.job
    held = lease.started_at is not None and job.kind is Kind.LEASE
    fate = policy.after_attempt(result, job.kind, job.attempts, job.max_attempts, held=held)
    if isinstance(fate, policy.Retry):
        await queue_again(tx, job, lease.board, fate.reason)
    else:
        await finish(tx, job, fate.result, lease.id)


async def _learn(tx: Tx, lease: LeaseRow, result: JobResult, settings: FarmSettings) -> None:
    """What an attempt tells of its board: an infrastructure's failure makes it suspect, a check decides."""
    job, what = lease.job, health.EventKind
    if job.kind is Kind.HEALTH:
        event = health.Event(what.HEALTHY if result.exit_code == EXIT_OK else what.UNHEALTHY, result.reason)
        return await board_health.change(tx, lease.board, event, settings)
    if result.infrastructure:
        reason = f"job {job.name} failed on it: {result.reason or 'the infrastructure failed'}"
        return await board_health.change(tx, lease.board, health.Event(what.INFRASTRUCTURE, reason), settings)
    if result.board_ns[1] and result.exit_code == EXIT_OK:
        await board_health.saw_it_work(tx, lease.board)
    if result.board_ns[1] and job.affinity:
        await tx.execute(_WARM, {"affinity": job.affinity, "most": _WARM_MOST, "board": lease.board})


async def cancelled(tx: Tx, queue: LeaseQueue, lease: LeaseRow, result: JobResult, settings: FarmSettings) -> None:
    """Somebody ended the lease's job."""
    await end(tx, queue, lease, result.reason, settings)
    await finish(tx, lease.job, result, lease.id, state=JobState.CANCELLED)

"""State changes of jobs, leases and boards, each with an event in the log.

:mod:`hil.controller.farm.scheduler.health` decides the new state of a board, and
:mod:`hil.controller.farm.scheduler.policy` whether a job is retried.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from hil.controller.farm.database.database import Tx
from hil.controller.farm.leasing.lease_queue import LeaseQueue
from hil.controller.farm.messages import FARM_USER, BoardState, JobResult, JobSpec, JobState, Kind, Priority, Submission
from hil.controller.farm.scheduler import health, policy
from hil.controller.farm.scheduler.candidates import WaitingJob
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store import case_results
from hil.controller.farm.store.event_log import note_board, note_ended, note_job, note_queued
from hil.controller.farm.store.records import (
    JobRow,
    LeaseRow,
    Row,
    as_json,
    fetch_rows,
    lock_active_leases,
    lock_job_rows,
    make_requests,
    read_board_rows,
)
from hil.core.results import Outcome
from hil.errors import EXIT_BOARD, EXIT_OK, EXIT_STAGE

_NEW = """
    with new as (
        insert into hil.submissions
            (user_name, project, title, selector, board, priority, timeout_s, max_attempts, trace, key, jobs, more,
            groups)
        values (%(user)s, %(project)s, %(title)s, %(selector)s, %(board)s, %(priority)s, %(timeout_s)s,
            %(max_attempts)s, %(trace)s, %(key)s, %(jobs)s, %(more)s, %(groups)s)
        returning *
    )
    insert into hil.jobs (submission, number, kind, spec, affinity, title, checks, state, boards, lane)
    select new.id, given.number, given.spec ->> 'kind', given.spec, given.spec ->> 'affinity',
        coalesce(given.spec ->> 'title', ''), %(checks)s, 'queued', 1 + jsonb_array_length(new.more),
        hil.lane(new.user_name, new.project, new.priority, new.selector, new.board, %(checks)s, '{}', new.more,
            new.groups)
    from new cross join jsonb_array_elements(%(specs)s::jsonb) with ordinality as given (spec, number)
    order by given.number
    returning id, submission
"""
_AGAIN = """
    update hil.jobs as job
    set state = 'queued', avoid = %(avoid)s, started_at = null, attempts = attempts - %(uncounted)s, lane = hil.lane(
        submission.user_name, submission.project, submission.priority, submission.selector, submission.board,
        job.checks, %(avoid)s, submission.more, submission.groups)
    from hil.submissions as submission
    where submission.id = job.submission and job.id = %(job)s
"""
_RESULT = """
    with first as (
        insert into hil.results (job, lease, exit_code, outcome, result)
        values (%(job)s, %(lease)s, %(exit_code)s, %(outcome)s, %(result)s)
    )
    update hil.jobs set state = %(state)s, finished_at = clock_timestamp() where id = %(job)s
"""


async def queue_jobs(
    tx: Tx,
    order: Submission,
    user: str,
    project: str,
    trace: str = "",
    *,
    groups: Iterable[str] = (),
    checks: str | None = None,
) -> tuple[int, list[int]]:
    """Queue the jobs of a submission. Returns the submission's number and the job ids.

    Args:
        groups: groups of the user, which give access to restricted boards.
        checks: board of a health job.
    """
    same = ("title", "selector", "board", "timeout_s", "max_attempts", "key")
    values = {name: getattr(order, name) for name in same} | {"user": user, "project": project, "trace": trace}
    specs = as_json([spec.to_json() for spec in order.specs])
    values |= {"priority": order.priority.value, "jobs": len(order.specs), "specs": specs, "checks": checks}
    values |= {"more": as_json([asdict(one) for one in order.more]), "groups": sorted(groups)}
    rows = await fetch_rows(tx, _NEW, values)
    submission, jobs = rows[0]["submission"], sorted(row["id"] for row in rows)
    await note_queued(tx, submission, jobs, order.title)
    return submission, jobs


async def queue_again(tx: Tx, job: JobRow, board: str, reason: str, *, interrupted: bool = False) -> None:
    """Requeue a job at its old queue position.

    Args:
        board: board of the attempt.
        interrupted: the board did not fail, so the job may use the board again. The attempt does not count, except for
            a command.
    """
    is_uncounted = interrupted and job.kind is not Kind.COMMAND
    avoid = sorted({*job.avoid, *([] if interrupted else [board])})
    await tx.execute(_AGAIN, {"job": job.id, "avoid": avoid, "uncounted": int(is_uncounted)})
    await note_job(tx, "again", job, JobState.QUEUED, reason=reason, board=board)


async def finish(
    tx: Tx, job: JobRow, result: JobResult, lease: int | None = None, *, state: JobState = JobState.DONE
) -> None:
    """Store a job's final result."""
    values = {
        "job": job.id,
        "lease": lease,
        "exit_code": result.exit_code,
        "outcome": result.outcome,
        "result": as_json(result.to_json()),
        "state": state.value,
    }
    await tx.execute(_RESULT, values)
    await note_job(tx, state.value, job, state, reason=result.reason)


_CHECK_TIMEOUT_SECONDS = 600.0

_CHANGE = """
    update hil.boards
    set state = %(state)s, failures = %(failures)s, reason = %(reason)s,
        checked_at = case when %(healthy)s then clock_timestamp() when %(doubted)s then null else checked_at end,
        check_at = clock_timestamp() + make_interval(secs => %(check_in_s)s)
    where name = %(board)s
"""
_UNCHECKED = """
    select name, failures, state from hil.boards as board
    where state in ('suspect', 'quarantined') and hold = '' and worker <> ''
        and (check_at is null or check_at <= clock_timestamp())
        and (%(boards)s::text[] is null or name = any(%(boards)s))
        and not exists (select from hil.jobs where checks = board.name and state in ('queued', 'running'))
"""


async def change_board(tx: Tx, board: str, event: health.Event, settings: FarmSettings) -> None:
    """Apply an event to a board: store the new state, and queue a health job if a check is due."""
    [row] = await fetch_rows(tx, "select state, failures, reason from hil.boards where name = %s for update", [board])
    state, failures = BoardState(row["state"]), row["failures"]
    to = health.apply_event(state, failures, event, settings)
    if (to.state, to.failures) != (state, failures) or to.doubted or event.what is health.EventKind.HEALTHY:
        values = {
            "board": board,
            "state": to.state.value,
            "failures": to.failures,
            "reason": "" if to.state is BoardState.ONLINE else to.reason or row["reason"],
            "healthy": event.what is health.EventKind.HEALTHY,
            "doubted": to.doubted,
            "check_in_s": to.check_in_s,
        }
        await tx.execute(_CHANGE, values)
    if to.state is not state or to.failures != failures:
        await note_board(tx, to.state.value, board, to.reason, is_new=to.state is not state)
    if to.state is BoardState.OFFLINE:
        await call_off_check(tx, board, to.reason)
    await order_checks(tx, [board])


async def order_checks(tx: Tx, boards: Sequence[str] | None = None) -> int:
    """Queue a health job for every board that is due for a check and has none. Returns their number."""
    found = await fetch_rows(tx, _UNCHECKED, {"boards": boards})
    for row in found:
        # Hosts from older releases use these options to switch the power of a board that failed before.
        options = {"state": row["state"], "failures": row["failures"]}
        order = Submission(
            title=f"check of {row['name']}",
            specs=(JobSpec(Kind.HEALTH, options),),
            board=row["name"],
            priority=Priority.HIGH,
            timeout_s=_CHECK_TIMEOUT_SECONDS,
            max_attempts=1,
        )
        await queue_jobs(tx, order, FARM_USER, "", checks=row["name"])
    return len(found)


async def call_off_check(tx: Tx, board: str, reason: str) -> None:
    """Cancel a board's queued health job, because the board is not available."""
    for job in await lock_job_rows(tx, "job.checks = %s and job.state = 'queued'", [board]):
        result = JobResult(EXIT_BOARD, "BOARD_LOST", f"cancelled: {reason}", infrastructure=True)
        await finish(tx, job, result, state=JobState.CANCELLED)


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
# A completed job on an online board counts as a passed check.
_WORKED = "update hil.boards set checked_at = clock_timestamp() where name = %s and state = 'online'"
# Maximum affinity keys stored per board.
_MAX_WARM = 64


async def _end_lease(
    tx: Tx, queue: LeaseQueue, lease: LeaseRow, reason: str, settings: FarmSettings, result: JobResult | None = None
) -> None:
    """End a lease: free the board, add the time to the user's share, and notify listeners.

    If the job runs with this lease, the leases of its other boards end as well.

    Args:
        result: report of the worker, if any.
    """
    if lease.job.boards > 1 and lease.part == 0:
        for other in await lock_active_leases(tx, "job.id = %(job)s and lease.part > 0", {"job": lease.job.id}):
            await _end_lease(tx, queue, other, f"job {lease.job.name} no longer uses the board", settings)
    stored = None if result is None else as_json(result.to_json())
    await tx.execute(_END, {"lease": lease.id, "reason": reason, "result": stored})
    share: Row = {"user": lease.job.user, "project": lease.job.project, "granted_at": lease.granted_at}
    await tx.execute(_SHARE, {**share, "half_life_s": settings.share_half_life_s})
    await queue.done(tx, lease.queue_id)
    await case_results.forget(tx, lease.id)
    await note_ended(tx, lease, reason)
    if lease.held_back:
        await note_board(tx, "maintenance", lease.board, "drained and idle")


async def lease_lost(
    tx: Tx, queue: LeaseQueue, lease: LeaseRow, reason: str, settings: FarmSettings, *, interrupted: bool = False
) -> None:
    """End a lease because the board was lost. Retry the job, or finish the job with ``BOARD_LOST``.

    Args:
        interrupted: an operator stopped the board's host or the farm, so the attempt does not count.
    """
    if not await _is_active(tx, lease):
        return
    await _end_lease(tx, queue, lease, reason, settings)
    lost = JobResult(EXIT_BOARD, "BOARD_LOST", reason, infrastructure=True)
    await _end_job(tx, queue, lease, lost, settings, interrupted=interrupted)
    what = health.EventKind.CHECK_LOST if lease.job.kind is Kind.HEALTH else health.EventKind.INFRASTRUCTURE
    doubt = health.Event(what, f"job {lease.job.name} was lost: {reason}")
    await change_board(tx, lease.board, doubt, settings)


async def lease_timed_out(tx: Tx, queue: LeaseQueue, lease: LeaseRow, settings: FarmSettings) -> None:
    """End a lease at the time limit. A job gets the result ``TIMEOUT``. A user's lease ends normally."""
    if not await _is_active(tx, lease):
        return None
    lease = await _find_main_lease(tx, lease)
    if lease.job.kind is Kind.LEASE:
        return await lease_over(tx, queue, lease, JobResult(EXIT_OK, reason="time limit reached"), settings)
    reason = "time limit exceeded"
    await _end_lease(tx, queue, lease, reason, settings)
    await _retry_or_finish(tx, lease, JobResult(EXIT_STAGE, "TIMEOUT", reason), settings)
    what = health.EventKind.UNHEALTHY if lease.job.kind is Kind.HEALTH else health.EventKind.INFRASTRUCTURE
    doubt = f"job {lease.job.name} exceeded the time limit"
    await change_board(tx, lease.board, health.Event(what, doubt), settings)


async def lease_over(
    tx: Tx,
    queue: LeaseQueue,
    lease: LeaseRow,
    result: JobResult,
    settings: FarmSettings,
    state: JobState = JobState.DONE,
) -> None:
    """End a lease and the job on request, with a given result."""
    if not await _is_active(tx, lease):
        return
    lease = await _find_main_lease(tx, lease)
    await _end_lease(tx, queue, lease, result.reason, settings)
    await finish(tx, lease.job, result, lease.id, state=state)
    if lease.job.kind is Kind.COMMAND:
        await _doubt_after_command(tx, lease, settings)


async def lease_reported(tx: Tx, queue: LeaseQueue, lease: LeaseRow, result: JobResult, settings: FarmSettings) -> None:
    """End a lease with the worker's report, and update job and board."""
    await _end_lease(tx, queue, lease, result.reason or result.outcome, settings, result)
    await _end_job(tx, queue, lease, result, settings)
    await _update_board(tx, lease, result, settings)


async def _end_job(
    tx: Tx,
    queue: LeaseQueue,
    lease: LeaseRow,
    result: JobResult,
    settings: FarmSettings,
    *,
    interrupted: bool = False,
) -> None:
    """Retry or finish a job after the end of one of its leases. The leases of its other boards end."""
    if lease.part == 0:
        return await _retry_or_finish(tx, lease, result, settings, interrupted=interrupted)
    text = f"board {lease.board}: {result.reason or result.outcome or 'the lease ended'}"
    result = result.replace(reason=text)
    if lease.job.kind is Kind.COMMAND and result.exit_code == EXIT_OK:
        # The host of this board only waits, so its report says nothing about the command.
        result = JobResult(EXIT_STAGE, Outcome.TIMEOUT.value, text)
    for main in await lock_active_leases(tx, "job.id = %(job)s and lease.part = 0", {"job": lease.job.id}):
        await _end_lease(tx, queue, main, text, settings)
        await _retry_or_finish(tx, main, result, settings, failed_on=lease.board, interrupted=interrupted)
        if main.job.kind is Kind.COMMAND:
            await _doubt_after_command(tx, main, settings)


async def _is_active(tx: Tx, lease: LeaseRow) -> bool:
    """Return False if a lease of a job with multiple boards has ended with the job since it was read."""
    if lease.job.boards == 1:
        return True
    return bool(await fetch_rows(tx, "select id from hil.leases where id = %s and ended_at is null", [lease.id]))


async def _find_main_lease(tx: Tx, lease: LeaseRow) -> LeaseRow:
    """Return the lease with which the job of a lease runs."""
    if lease.part == 0:
        return lease
    found = await lock_active_leases(tx, "job.id = %(job)s and lease.part = 0", {"job": lease.job.id})
    return next(iter(found), lease)


async def _has_others(tx: Tx, job: JobRow, board: str, settings: FarmSettings) -> bool:
    """Return True if the job can run on another board on which it has not failed yet."""
    query = "select selector, more, groups from hil.submissions where id = %s"
    [order] = await fetch_rows(tx, query, [job.submission])
    wanted = WaitingJob(
        job.id,
        job.user,
        selector=order["selector"],
        board=job.pinned,
        more=make_requests(order["more"]),
        groups=frozenset(order["groups"]),
    )
    avoid = {*job.avoid, board}
    known = await read_board_rows(tx, settings)
    return wanted.matches_all(one for one in known if one.may_serve and one.name not in avoid)


async def _retry_or_finish(
    tx: Tx,
    lease: LeaseRow,
    result: JobResult,
    settings: FarmSettings,
    *,
    failed_on: str = "",
    interrupted: bool = False,
) -> None:
    """Retry or finish a job after an attempt.

    Args:
        failed_on: board of an infrastructure failure; "" for the board of the lease.
        interrupted: an operator stopped the board's host or the farm, so the attempt does not count.
    """
    job, failed_on = lease.job, failed_on or lease.board
    held = lease.started_at is not None and job.kind is Kind.LEASE
    others = result.infrastructure and await _has_others(tx, job, failed_on, settings)
    final = policy.decide_after_attempt(
        result, job.kind, job.attempts, job.max_attempts, held=held, others=others, interrupted=interrupted
    )
    if final is None:
        reason = result.reason or "infrastructure failure"
        await queue_again(tx, job, failed_on, reason, interrupted=interrupted)
    else:
        await finish(tx, job, final, lease.id)


async def _update_board(tx: Tx, lease: LeaseRow, result: JobResult, settings: FarmSettings) -> None:
    """Update a board after an attempt.

    Infrastructure failures make the board suspect. The result of a health job sets the board's state.
    """
    job, what = lease.job, health.EventKind
    if job.kind is Kind.HEALTH:
        kind = what.HEALTHY if result.exit_code == EXIT_OK else what.UNHEALTHY
        kind = what.BUSY if result.outcome == Outcome.BOARD_BUSY.value else kind
        return await change_board(tx, lease.board, health.Event(kind, result.reason), settings)
    if result.infrastructure:
        reason = f"job {job.name} failed: {result.reason or 'infrastructure failure'}"
        return await change_board(tx, lease.board, health.Event(what.INFRASTRUCTURE, reason), settings)
    if job.kind is Kind.COMMAND:
        return await _doubt_after_command(tx, lease, settings)
    if result.board_ns[1] and result.exit_code == EXIT_OK:
        await tx.execute(_WORKED, [lease.board])
    if result.board_ns[1] and job.affinity:
        await tx.execute(_WARM, {"affinity": job.affinity, "most": _MAX_WARM, "board": lease.board})


async def _doubt_after_command(tx: Tx, lease: LeaseRow, settings: FarmSettings) -> None:
    """Queue a check of a board, because a command may have changed anything on it."""
    reason = f"job {lease.job.name} ran a command"
    await change_board(tx, lease.board, health.Event(health.EventKind.UNCHECKED, reason), settings)

"""Grant boards to waiting jobs.

This module reads the queue and creates the leases. :mod:`hil.controller.farm.scheduler.policy` decides.

The transaction that makes a grant possible also makes the grant, so a free board never waits next to a matching job.
Jobs with equal scheduling properties form a lane (``hil.lane`` in the schema). hil reads as many jobs of a lane as the
lane has free boards, and a few more to choose from.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from hil.controller.farm.database.database import Tx
from hil.controller.farm.leasing import transitions
from hil.controller.farm.leasing.lease_queue import LeaseQueue
from hil.controller.farm.messages import PROBE_SECONDS, Kind, Priority, Submission
from hil.controller.farm.scheduler import health, policy
from hil.controller.farm.scheduler.candidates import BoardRow, BoardUse, FreeBoard, WaitingJob
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store.event_log import note_granted
from hil.controller.farm.store.records import JOBS, LEASES, NAME, fetch_rows, make_requests, read_board_rows

# Extra jobs to read per lane, because a board may have cached data for one of them.
_CHOICE = 16
# Extra time in seconds for a worker to send the report after the board check of a timed-out job.
_REPORT_SECONDS = 10.0
_LANES = f"""
    with recursive lanes (lane) as (
        (select lane from hil.jobs where state = 'queued' order by lane limit 1)
        union all
        select (select lane from hil.jobs where state = 'queued' and lane > lanes.lane order by lane limit 1)
        from lanes where lane is not null
    )
    select head.*
    from lanes
    cross join lateral (
        select 0 as id, job.lane, job.kind, job.avoid, submission.user_name as user, submission.project,
            submission.priority, submission.selector, submission.board, submission.more, submission.groups
        from {JOBS} where job.state = 'queued' and job.lane = lanes.lane order by job.queued_at, job.id limit 1
    ) as head
"""
_WAITING = """
    select job.id, wanted.lane, job.affinity, extract(epoch from clock_timestamp() - job.queued_at)::float as waits_s
    from unnest(%(lanes)s::text[], %(most)s::int[]) as wanted (lane, most)
    cross join lateral (
        select id, affinity, queued_at from hil.jobs
        where state = 'queued' and lane = wanted.lane order by queued_at, id limit wanted.most
    ) as job
"""
_USE = f"""
    select user_name, project, sum(running)::int as running, sum(board_s)::float as board_s
    from (
        select submission.user_name, submission.project, 1 as running,
            extract(epoch from clock_timestamp() - lease.granted_at)::float as board_s
        from {LEASES} where lease.ended_at is null
        union all
        select user_name, project, 0, hil.faded(board_s, at, %(half_life_s)s) from hil.shares
    ) as had
    group by user_name, project
"""
_LEASES = f"""
    with chosen (job, board, key, part) as (
        select * from unnest(%(jobs)s::bigint[], %(boards)s::text[], %(keys)s::text[], %(parts)s::int[])
    ),
    board as (
        update hil.boards set fence = fence + 1 from chosen where name = chosen.board
        returning name, fence, worker
    ),
    job as (
        update hil.jobs set state = 'running', attempts = attempts + 1 from chosen where id = chosen.job
        returning id, submission, number, attempts, kind
    ),
    lease as (
        insert into hil.leases (job, part, board, worker, fence, attempt, key, expires_at, until, holder_until)
        select job.id, chosen.part, board.name, board.worker, board.fence, job.attempts,
            case when job.kind = 'lease' or chosen.part > 0 then chosen.key else '' end,
            clock_timestamp() + make_interval(secs => %(lease_s)s),
            clock_timestamp() + make_interval(secs => submission.timeout_s
                + case when job.kind in ('lease', 'health') then 0 else %(probe_s)s end),
            case when job.kind = 'lease' and chosen.part = 0
                then clock_timestamp() + make_interval(secs => %(holder_s)s) end
        from chosen
        join board on board.name = chosen.board
        join job on job.id = chosen.job
        join hil.submissions as submission on submission.id = job.submission
        returning id, job, board
    )
    select lease.id, lease.job, lease.board, job.submission, {NAME} as name
    from lease
    join job on job.id = lease.job
    join hil.submissions as submission on submission.id = job.submission
    order by lease.job, lease.id
"""
_SEVERAL = "select exists (select from hil.jobs where state = 'queued' and boards > 1) as waits"
_QUEUE_IDS = """
    update hil.leases as lease set queue_id = brought.queue_id
    from unnest(%s::bigint[], %s::bigint[]) as brought (lease, queue_id)
    where lease.id = brought.lease
"""


async def grant_boards(
    tx: Tx, queue: LeaseQueue, settings: FarmSettings, boards: Sequence[str] | None = None
) -> list[str]:
    """Grant free boards to waiting jobs and return the granted boards. Call it in a ``serialized`` function.

    A board with an overdue health check gets a health job first.

    Args:
        boards: boards that may have become free. None: any board may be free, and any job may be new.
    """
    known = await read_board_rows(tx, settings, boards)
    for one in known:
        if one.doubtful:
            await transitions.change_board(tx, one.name, health.Event(health.EventKind.UNCHECKED), settings)
    free = _list_free_boards(known)
    if not free:
        return []
    lanes = await list_queued_lanes(tx)
    several = any(lane.more for lane in lanes)
    if boards is not None and (several or any(lane.avoid for lane in lanes)):
        known = await read_board_rows(tx, settings)
        # A job with several boards may keep other free boards.
        free = _list_free_boards(known) if several else free
    waiting = await _read_waiting_jobs(tx, free, [lane.without_avoid(known) for lane in lanes])
    busy = [board for one in known if (board := one.occupied) is not None] if several else []
    return await _assign_boards(tx, queue, settings, waiting, free, busy)


async def grant_new_jobs(
    tx: Tx,
    queue: LeaseQueue,
    settings: FarmSettings,
    order: Submission,
    lane: WaitingJob,
    jobs: Sequence[int],
    known: Iterable[BoardRow],
) -> None:
    """Grant free boards to the new jobs of a submission.

    Giving these jobs precedence is fair, because no older job can use a board that is free now. This is not true if a
    job with multiple boards waits, which may keep free boards.

    Args:
        jobs: job ids in the order of the specs.
        known: all boards. The function considers all free boards with cached data for the jobs, and at most one other
            board per job.
    """
    [several] = await fetch_rows(tx, _SEVERAL)
    if several["waits"]:
        await grant_boards(tx, queue, settings)
        return
    affinities = {spec.affinity for spec in order.specs}
    free = _list_free_boards(known)
    warm = [one for one in free if not one.warm.isdisjoint(affinities) and lane.takes(one)]
    cold = islice((one for one in free if one.warm.isdisjoint(affinities) and lane.takes(one)), len(jobs))
    enough = [*warm, *cold]
    pairs = zip(jobs, order.specs, strict=True)
    waiting = [replace(lane, id=job, affinity=spec.affinity) for job, spec in islice(pairs, len(enough) + _CHOICE)]
    await _assign_boards(tx, queue, settings, waiting, enough)


async def list_queued_lanes(tx: Tx) -> list[WaitingJob]:
    """Return the lanes with waiting jobs."""
    rows = await fetch_rows(tx, _LANES)
    read: dict[str, Callable[[Any], Any]] = {
        "kind": Kind,
        "priority": Priority,
        "avoid": frozenset,
        "more": make_requests,
        "groups": frozenset,
    }
    return [WaitingJob(**{**row, **{name: kind(row[name]) for name, kind in read.items()}}) for row in rows]


def _list_free_boards(boards: Iterable[BoardRow]) -> list[FreeBoard]:
    return [free for one in boards if (free := one.free) is not None]


async def compute_shares(tx: Tx, settings: FarmSettings) -> dict[tuple[str, str], BoardUse]:
    """Return the current and past board use of every user and project."""
    rows = await fetch_rows(tx, _USE, {"half_life_s": settings.share_half_life_s})
    return {(row["user_name"], row["project"]): BoardUse(row["running"], row["board_s"]) for row in rows}


async def list_waiting_jobs(tx: Tx, lanes: Sequence[WaitingJob], most: Sequence[int]) -> list[WaitingJob]:
    """Return the oldest jobs of every lane, limited by ``most``."""
    by_name = {lane.lane: lane for lane in lanes}
    jobs = await fetch_rows(tx, _WAITING, {"lanes": list(by_name), "most": list(most)})
    return [replace(by_name[job["lane"]], **job) for job in jobs]


async def _read_waiting_jobs(tx: Tx, free: Sequence[FreeBoard], lanes: Sequence[WaitingJob]) -> list[WaitingJob]:
    """Return jobs that can use a free board.

    For every lane, return as many jobs as the lane has free boards, and some more to choose from.
    """
    wanted = [(lane, sum(lane.takes(one) for one in free)) for lane in lanes]
    wanted = [(lane, count) for lane, count in wanted if count]
    if not wanted:
        return []
    return await list_waiting_jobs(tx, [lane for lane, _ in wanted], [count + _CHOICE for _, count in wanted])


async def _assign_boards(
    tx: Tx,
    queue: LeaseQueue,
    settings: FarmSettings,
    waiting: Sequence[WaitingJob],
    free: Sequence[FreeBoard],
    busy: Sequence[FreeBoard] = (),
) -> list[str]:
    """Assign boards by policy and create the leases."""
    if not waiting or not free:
        return []
    # The fair share only matters if there are several users or projects.
    has_several_users = len({(one.user, one.project) for one in waiting}) > 1
    limited = any(math.isfinite(settings.limits.get_limits(one.user).boards) for one in waiting)
    use = await compute_shares(tx, settings) if has_several_users or limited else {}
    several: dict[str, Any] = {"busy": busy, "gather_s": settings.gather_s} if any(one.more for one in waiting) else {}
    pairs = policy.assign(waiting, free, use, settings.aging_s, settings.limits, **several)
    return await _create_leases(tx, queue, settings, pairs)


async def _create_leases(
    tx: Tx, queue: LeaseQueue, settings: FarmSettings, pairs: Sequence[tuple[int, str]]
) -> list[str]:
    """Insert the leases and queue them for the boards' workers."""
    if not pairs:
        return []
    count: Counter[int] = Counter()
    parts = []
    for job, _ in pairs:
        parts.append(count[job])
        count[job] += 1
    values = {
        "parts": parts,
        "jobs": [job for job, _ in pairs],
        "boards": [board for _, board in pairs],
        "keys": [secrets.token_urlsafe(24) for _ in pairs],
        "lease_s": settings.lease_s,
        "probe_s": PROBE_SECONDS + _REPORT_SECONDS,
        "holder_s": settings.holder_s,
    }
    leases = await fetch_rows(tx, _LEASES, values)
    brought = [await queue.queue_lease(tx, row["board"], row["id"]) for row in leases]
    await tx.execute(_QUEUE_IDS, [[row["id"] for row in leases], brought])
    await note_granted(tx, leases)
    return [row["board"] for row in leases]

"""Who gets which board. The rule itself is :mod:`hil.controller.farm.scheduler.policy`; here is what it is asked about.

Granting happens in the transaction that made it possible, so that a free board and a job that may have it never wait
beside each other. Jobs that no matching can tell apart form a lane (``hil.lane`` in the schema); of each lane only as
many are read as there are free boards for it, and a few more to choose from.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

from hil.controller.farm.messages import Kind, Priority, Submission
from hil.controller.farm.scheduler import health, policy
from hil.controller.farm.scheduler.policy import BoardRow, Free, Waiting
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store import transitions
from hil.controller.farm.store.database import Tx
from hil.controller.farm.store.event_log import note_granted
from hil.controller.farm.store.lease_queue import LeaseQueue
from hil.controller.farm.store.records import JOBS, LEASES, NAME, board_rows, fetched

# More of a lane than there are boards for it: among them may be one that a board is warm for.
_CHOICE = 16
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
            submission.priority, submission.selector, submission.board
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
    with chosen (job, board, key) as (select * from unnest(%(jobs)s::bigint[], %(boards)s::text[], %(keys)s::text[])),
    board as (
        update hil.boards set fence = fence + 1 from chosen where name = chosen.board
        returning name, fence, worker
    ),
    job as (
        update hil.jobs set state = 'running', attempts = attempts + 1 from chosen where id = chosen.job
        returning id, submission, number, attempts, kind
    ),
    lease as (
        insert into hil.leases (job, board, worker, fence, attempt, key, expires_at, until, holder_until)
        select job.id, board.name, board.worker, board.fence, job.attempts,
            case when job.kind = 'lease' then chosen.key else '' end,
            clock_timestamp() + make_interval(secs => %(lease_s)s),
            clock_timestamp() + make_interval(secs => submission.timeout_s),
            case when job.kind = 'lease' then clock_timestamp() + make_interval(secs => %(holder_s)s) end
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
"""
_QUEUE_IDS = """
    update hil.leases as lease set queue_id = brought.queue_id
    from unnest(%s::bigint[], %s::bigint[]) as brought (lease, queue_id)
    where lease.id = brought.lease
"""


async def grant(tx: Tx, queue: LeaseQueue, settings: FarmSettings, boards: Sequence[str] | None = None) -> list[str]:
    """Give free boards to waiting jobs; returns those that were given. For callers within :func:`.records.serialized`.

    Only ``boards`` may have become free; None is any, and any job may be new. One of whose health nothing is known for
    long is checked first.
    """
    known = await board_rows(tx, settings, boards)
    for one in known:
        if one.doubtful:
            await transitions.change_board(tx, one.name, health.Event(health.EventKind.UNCHECKED), settings)
    free = _free(known)
    if not free:
        return []
    lanes = await queued_lanes(tx)
    if boards is not None and any(lane.avoid for lane in lanes):
        known = await board_rows(tx, settings)
    waiting = await _waiting(tx, free, [lane.allowed(known) for lane in lanes])
    return await _assign(tx, queue, settings, waiting, free)


async def grant_new(
    tx: Tx,
    queue: LeaseQueue,
    settings: FarmSettings,
    order: Submission,
    lane: Waiting,
    jobs: Sequence[int],
    known: Iterable[BoardRow],
) -> None:
    """Give free boards to an order's jobs, which have just come. Nobody else waits for a board that is free.

    Args:
        jobs: their numbers, in the order of its specs.
        known: all boards. Of those that are free only the warm ones and as many as there are jobs are looked at.
    """
    affinities = {spec.affinity for spec in order.specs}
    free = _free(known)
    warm = [one for one in free if not one.warm.isdisjoint(affinities) and lane.takes(one)]
    cold = islice((one for one in free if one.warm.isdisjoint(affinities) and lane.takes(one)), len(jobs))
    enough = [*warm, *cold]
    pairs = zip(jobs, order.specs, strict=True)
    waiting = [replace(lane, id=job, affinity=spec.affinity) for job, spec in islice(pairs, len(enough) + _CHOICE)]
    await _assign(tx, queue, settings, waiting, enough)


async def queued_lanes(tx: Tx) -> list[Waiting]:
    """The lanes in which jobs wait."""
    rows = await fetched(tx, _LANES)
    read = {"kind": Kind, "priority": Priority, "avoid": frozenset}
    return [Waiting(**{**row, **{name: kind(row[name]) for name, kind in read.items()}}) for row in rows]


def _free(boards: Iterable[BoardRow]) -> list[Free]:
    return [free for one in boards if (free := one.free) is not None]


async def shares(tx: Tx, settings: FarmSettings) -> dict[tuple[str, str], policy.Use]:
    """What each user and project has of the boards, and had."""
    rows = await fetched(tx, _USE, {"half_life_s": settings.share_half_life_s})
    return {(row["user_name"], row["project"]): policy.Use(row["running"], row["board_s"]) for row in rows}


async def waiting_jobs(tx: Tx, lanes: Sequence[Waiting], most: Sequence[int]) -> list[Waiting]:
    """Of each lane the jobs that wait longest, so many."""
    by_name = {lane.lane: lane for lane in lanes}
    jobs = await fetched(tx, _WAITING, {"lanes": list(by_name), "most": list(most)})
    return [replace(by_name[job["lane"]], **job) for job in jobs]


async def _waiting(tx: Tx, free: Sequence[Free], lanes: Sequence[Waiting]) -> list[Waiting]:
    """The jobs that may have one of the free boards: of each lane as many as it could use, and some to choose from."""
    wanted = [(lane, sum(lane.takes(one) for one in free)) for lane in lanes]
    wanted = [(lane, count) for lane, count in wanted if count]
    if not wanted:
        return []
    return await waiting_jobs(tx, [lane for lane, _ in wanted], [count + _CHOICE for _, count in wanted])


async def _assign(
    tx: Tx, queue: LeaseQueue, settings: FarmSettings, waiting: Sequence[Waiting], free: Sequence[Free]
) -> list[str]:
    """Ask the policy, and do as it says."""
    if not waiting or not free:
        return []
    # Shares decide between users alone.
    several = len({(one.user, one.project) for one in waiting}) > 1
    use = await shares(tx, settings) if several else {}
    return await _lease(tx, queue, settings, policy.assign(waiting, free, use, settings.aging_s))


async def _lease(tx: Tx, queue: LeaseQueue, settings: FarmSettings, pairs: Sequence[tuple[int, str]]) -> list[str]:
    """Write the leases down, and have them brought to the boards' workers."""
    if not pairs:
        return []
    values = {
        "jobs": [job for job, _ in pairs],
        "boards": [board for _, board in pairs],
        "keys": [secrets.token_urlsafe(24) for _ in pairs],
        "lease_s": settings.lease_s,
        "holder_s": settings.holder_s,
    }
    leases = await fetched(tx, _LEASES, values)
    brought = [await queue.bring(tx, row["board"], row["id"]) for row in leases]
    await tx.execute(_QUEUE_IDS, [[row["id"] for row in leases], brought])
    await note_granted(tx, leases)
    return [row["board"] for row in leases]

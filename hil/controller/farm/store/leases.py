"""Leases from the grant to the report: what workers and holders say of them."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hil.controller.farm.messages import MOST_FENCE, BoardCard, Grant, JobResult, JobSpec, Kind
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store import transitions
from hil.controller.farm.store.allocator import grant
from hil.controller.farm.store.database import Tx
from hil.controller.farm.store.event_log import note_board, note_lease, note_started
from hil.controller.farm.store.lease_queue import LeaseQueue
from hil.controller.farm.store.records import (
    LEASES,
    NAME,
    LeaseRow,
    as_json,
    fetched,
    lease_row,
    serialized,
    storable,
    stored,
)
from hil.errors import EXIT_OK, AccessRefused

_GRANT = f"""
    select lease.id as lease, lease.job as job_id, lease.board, lease.fence, lease.attempt, {NAME} as job, job.spec,
        submission.timeout_s, submission.user_name as user, submission.trace
    from {LEASES} where lease.ended_at is null
"""
# A beat waits for nobody: what somebody is changing just now it passes over, and the next one comes soon.
_KEEP = """
    with kept as (
        select lease.id from hil.leases as lease
        join unnest(%(leases)s::bigint[], %(workers)s::text[]) as said (lease, worker)
            on said.lease = lease.id and said.worker = lease.worker
        where lease.ended_at is null
        for no key update of lease skip locked
    )
    update hil.leases as lease set expires_at = clock_timestamp() + make_interval(secs => %(lease_s)s)
    from kept where lease.id = kept.id
"""
_OWN = """
    with owned as (
        select board.name from hil.boards as board
        join unnest(%(boards)s::text[], %(workers)s::text[]) as said (board, worker)
            on said.board = board.name and said.worker = board.worker
        for no key update of board skip locked
    )
    update hil.boards as board set owned_until = clock_timestamp() + make_interval(secs => %(owner_s)s)
    from owned where board.name = owned.name
"""
_OVER = """
    select said.lease, said.worker, case
            when lease.id is null then 'the farm has no such lease'
            when lease.worker <> said.worker then 'it was never this worker''s'
            else coalesce(nullif(lease.reason, ''), 'it is over')
        end as reason
    from unnest(%(leases)s::bigint[], %(workers)s::text[]) as said (lease, worker)
    left join hil.leases as lease on lease.id = said.lease
    where lease.id is null or lease.ended_at is not null or lease.worker <> said.worker
"""
_STARTED = """
    with begun as (
        update hil.leases set started_at = clock_timestamp(), direct = %(direct)s
        where id = %(lease)s and worker = %(worker)s and ended_at is null and started_at is null
        returning job
    )
    update hil.jobs set started_at = clock_timestamp() from begun where id = begun.job returning id
"""
_SAID = "select coalesce(result = %(result)s::jsonb, false) as same from hil.leases where id = %(lease)s"
_HOLD = """
    update hil.leases set holder_until = clock_timestamp() + make_interval(secs => %(holder_s)s)
    where id = %(lease)s and key = %(key)s and key <> '' and ended_at is null
    returning id
"""
_READYING = """
    update hil.leases set holder_until = clock_timestamp() + make_interval(secs => %(holder_s)s)
    where id = %(lease)s and started_at is null and ended_at is null and holder_until is not null
"""


@dataclass(frozen=True)
class BeatReply:
    """What a worker's beat is answered with."""

    owner: bool  # whether its board is its own
    vacant: bool = False  # whether the board is nobody's, so that who stands by for it may present it again
    over: dict[int, str] = field(default_factory=dict)  # of the leases that it works on, those that are over, and why


@dataclass(frozen=True)
class WorkerBeat:
    """A worker's beat: its board, and the leases that it works on."""

    board: str
    worker: str
    leases: Collection[int] = ()


@dataclass(frozen=True)
class LeaseStatus:
    """What a lease's holder is told."""

    card: BoardCard
    key: str  # shows that one holds it
    direct: str  # the agent's address for whoever is on the board's host
    started: bool  # whether the board's session is open


async def grant_of(tx: Tx, lease: int, settings: FarmSettings) -> Grant | None:
    """What a lease's host and holder are told; None once it is over."""
    return next(iter(await grants_of(tx, [lease], settings)), None)


async def grants_of(tx: Tx, leases: Collection[int], settings: FarmSettings) -> list[Grant]:
    """What the hosts of leases are told, of those that are not over."""
    rows = await fetched(tx, f"{_GRANT} and lease.id = any(%s) order by lease.id", [list(leases)])
    return [Grant(**{**row, "spec": JobSpec.of_json(row["spec"]), "ttl_s": settings.lease_s}) for row in rows]


async def lease_of_job(tx: Tx, job_id: int) -> int | None:
    """The lease that a job has now."""
    rows = await fetched(tx, "select id from hil.leases where job = %s and ended_at is null", [job_id])
    return rows[0]["id"] if rows else None


async def holding(tx: Tx, lease: int) -> LeaseStatus | None:
    """What a lease's holder is told besides its grant; None once it is over."""
    query = (
        "select lease.key, lease.direct, lease.started_at is not null as started, board.card"
        " from hil.leases as lease join hil.boards as board on board.name = lease.board"
        " where lease.id = %s and lease.ended_at is null"
    )
    rows = await fetched(tx, query, [lease])
    return LeaseStatus(**{**rows[0], "card": BoardCard.of_json(rows[0]["card"])}) if rows else None


async def beats(tx: Tx, given: Sequence[WorkerBeat], settings: FarmSettings) -> list[BeatReply]:
    """Workers were heard of: their boards stay their own, and the leases that they work on stay theirs."""
    boards, workers = [one.board for one in given], [one.worker for one in given]
    pairs = [(lease, one.worker) for one in given for lease in one.leases]
    kept = {"leases": [lease for lease, _ in pairs], "workers": [worker for _, worker in pairs]}
    async with tx.pipeline():
        await tx.execute(_OWN, {"boards": boards, "workers": workers, "owner_s": settings.owner_s})
        owners = await tx.execute("select name, worker from hil.boards where name = any(%s)", [boards])
        if pairs:
            await tx.execute(_KEEP, {**kept, "lease_s": settings.lease_s})
        owner = {row["name"]: row["worker"] for row in await owners.fetchall()}
    ended = await over(tx, pairs)
    return [
        BeatReply(
            owner=owner.get(one.board) == one.worker,
            vacant=owner.get(one.board) == "",
            over={lease: ended[lease, one.worker] for lease in one.leases if (lease, one.worker) in ended},
        )
        for one in given
    ]


async def over(tx: Tx, pairs: Sequence[tuple[int, str]]) -> dict[tuple[int, str], str]:
    """Of leases that workers work on: those that are over or never were theirs, and why."""
    if not pairs:
        return {}
    values = {"leases": [lease for lease, _ in pairs], "workers": [worker for _, worker in pairs]}
    rows = await fetched(tx, _OVER, values)
    return {(row["lease"], row["worker"]): row["reason"] for row in rows}


async def started(tx: Tx, lease: int, worker: str, direct: str) -> None:
    """A lease's board has begun: its session is open. ``direct``: where its holder on the same machine reaches it."""
    async with tx.pipeline():
        begun = await fetched(tx, _STARTED, {"lease": lease, "worker": worker, "direct": direct})
        row = await lease_row(tx, lease) if begun else None
        if row is not None:
            await note_started(tx, row)


@serialized
async def report(
    tx: Tx, queue: LeaseQueue, lease: int, worker: str, result: JobResult, fence: int, settings: FarmSettings
) -> tuple[bool, str]:
    """How a lease's job ended, of its board's worker; whether that counted, and why not. What comes late does not.

    A fence (the highest that the board has seen) that makes no sense is told and not stored; the result counts.
    """
    result = stored(result)
    row = await lease_row(tx, lease)
    if row is None or row.worker != worker:
        return False, "the farm has given this worker no such lease"
    if row.ended_at is not None:
        return await _repeated(tx, row, result)
    if 0 <= fence < MOST_FENCE:
        await tx.execute("update hil.boards set fence = greatest(fence, %s) where name = %s", [fence, row.board])
    else:
        await note_board(
            tx, "fence", row.board, f"its host reports the fence {fence}, which no board comes to: not kept"
        )
    await transitions.lease_reported(tx, queue, row, result, settings)
    # A job that failed for the infrastructure's sake may go to any board, and so may those that had to avoid this one.
    everywhere = result.infrastructure or row.job.kind is Kind.HEALTH
    await grant(tx, queue, settings, None if everywhere else [row.board])
    return True, ""


async def _repeated(tx: Tx, row: LeaseRow, result: JobResult) -> tuple[bool, str]:
    """A report of a lease that is over: the same once more, or too late."""
    # Compared where it is kept: a number may come back as another one of the same value.
    [stored] = await fetched(tx, _SAID, {"lease": row.id, "result": as_json(result.to_json())})
    if stored["same"]:
        return True, ""
    reason = "it has its result already" if row.result is not None else row.reason
    late = f"{reason}; this counts for nothing: {result.outcome or result.exit_code} {result.reason}"
    await note_lease(tx, "late_report", row, late.strip())
    return False, f"the lease is over: {reason}"


async def renew_holder(tx: Tx, lease: int, key: str, settings: FarmSettings) -> bool:
    """A lease's holder was heard of; False: it is over, or the key is not its own."""
    values = {"lease": lease, "key": key, "holder_s": settings.holder_s}
    return bool(await fetched(tx, _HOLD, values))


async def end_of(tx: Tx, lease: int, key: str) -> str | None:
    """Why a lease is over; None: there is none of that key."""
    rows = await fetched(tx, "select reason, key from hil.leases where id = %s", [lease])
    if not rows or not key or not hmac.compare_digest(rows[0]["key"].encode(), key.encode()):
        return None
    return rows[0]["reason"] or "it is over"


async def wait_for_start(tx: Tx, lease: int, settings: FarmSettings) -> None:
    """A lease's holder waits while its board is made ready, however long that takes."""
    await tx.execute(_READYING, {"lease": lease, "holder_s": settings.holder_s})


@serialized
async def release(tx: Tx, queue: LeaseQueue, lease: int, key: str, reason: str, settings: FarmSettings) -> None:
    """A lease's holder gives it back. One that is over already is over; AccessRefused where the key is not its own."""
    row = await lease_row(tx, lease)
    if row is None or row.job.kind is not Kind.LEASE or not hmac.compare_digest(row.key.encode(), key.encode()):
        raise AccessRefused(f"this key is not that of lease {lease}")
    if row.ended_at is None:
        await transitions.lease_over(tx, queue, row, JobResult(EXIT_OK, reason=storable(reason)), settings)
        await grant(tx, queue, settings, [row.board])

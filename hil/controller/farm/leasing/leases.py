"""Leases from grant to report: heartbeats, holders and results."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hil.controller.farm.database.database import Tx
from hil.controller.farm.leasing import transitions
from hil.controller.farm.leasing.allocator import grant_boards
from hil.controller.farm.leasing.lease_queue import LeaseQueue
from hil.controller.farm.messages import (
    MAX_FENCE,
    PROBE_SECONDS,
    BoardCard,
    Grant,
    GrantedLease,
    JobResult,
    JobSpec,
    Kind,
)
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store.event_log import note_board, note_lease, note_started
from hil.controller.farm.store.records import (
    LEASES,
    NAME,
    LeaseRow,
    Row,
    as_json,
    fetch_rows,
    lease_row,
    make_storable,
    normalize_document,
    serialize_calls,
)
from hil.controller.records.base import make_record
from hil.errors import EXIT_OK, AccessRefused

_GRANT = f"""
    select lease.id as lease, lease.job as job_id, lease.part, lease.board, lease.fence, lease.attempt, {NAME} as job,
        job.spec, job.boards, submission.title, submission.timeout_s, submission.user_name as user, submission.trace
    from {LEASES} where lease.ended_at is null
"""
_PARTS = """
    select lease.id as lease, lease.job, lease.key, lease.direct, board.card
    from hil.leases as lease join hil.boards as board on board.name = lease.board
    where lease.job = any(%s) and lease.part > 0 and lease.ended_at is null order by lease.part
"""
# Heartbeats skip locked rows instead of waiting for the lock, because the next heartbeat follows soon.
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
_EXTEND_OWNED = """
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
            when lease.id is null then 'unknown lease'
            when lease.worker <> said.worker then 'lease of a different worker'
            else coalesce(nullif(lease.reason, ''), 'ended')
        end as reason
    from unnest(%(leases)s::bigint[], %(workers)s::text[]) as said (lease, worker)
    left join hil.leases as lease on lease.id = said.lease
    where lease.id is null or lease.ended_at is not null or lease.worker <> said.worker
"""
_STARTED = """
    with begun as (
        update hil.leases set started_at = clock_timestamp(), direct = %(direct)s
        where id = %(lease)s and worker = %(worker)s and ended_at is null and started_at is null
        returning job, part
    ),
    job as (
        update hil.jobs set started_at = clock_timestamp() from begun where id = begun.job and begun.part = 0
        returning id
    )
    select job from begun
"""
_IS_SAME_RESULT = "select coalesce(result = %(result)s::jsonb, false) as same from hil.leases where id = %(lease)s"
_HOLD = """
    update hil.leases
    set holder_until = case when part = 0 then clock_timestamp() + make_interval(secs => %(holder_s)s) end
    where id = %(lease)s and key = %(key)s and key <> '' and ended_at is null
    returning id
"""
_READYING = """
    update hil.leases set holder_until = clock_timestamp() + make_interval(secs => %(holder_s)s)
    where id = %(lease)s and started_at is null and ended_at is null and holder_until is not null
"""


@dataclass(frozen=True)
class BeatReply:
    """Reply to a worker's heartbeat."""

    owner: bool  # True if the worker owns the board
    vacant: bool = False  # True if the board has no owner, so that a standby worker may present it
    over: dict[int, str] = field(default_factory=dict)  # reported leases that have ended -> reason


@dataclass(frozen=True)
class WorkerBeat:
    """Heartbeat of a worker: board and current leases."""

    board: str
    worker: str
    leases: Collection[int] = ()


@dataclass(frozen=True)
class LeaseStatus:
    """Lease data for the holder."""

    card: BoardCard
    key: str  # secret of the holder
    direct: str  # agent address for processes on the board's host
    started: bool  # True if the sessions of all boards of the job are open


async def read_grant(tx: Tx, lease: int, settings: FarmSettings) -> Grant | None:
    """Return the grant of a lease, or None if the lease has ended."""
    return next(iter(await read_grants(tx, [lease], settings)), None)


async def read_grants(tx: Tx, leases: Collection[int], settings: FarmSettings) -> list[Grant]:
    """Return the grants of the active leases among ``leases``."""
    rows = await fetch_rows(tx, f"{_GRANT} and lease.id = any(%s) order by lease.id", [list(leases)])
    several = [row["job_id"] for row in rows if row["boards"] > 1 and row["part"] == 0]
    parts = await fetch_rows(tx, _PARTS, [several]) if several else []
    others = (
        {one.lease: one for one in await read_grants(tx, [part["lease"] for part in parts], settings)} if parts else {}
    )
    grants = []
    for row in rows:
        part, title, _ = row.pop("part"), row.pop("title"), row.pop("boards")
        spec = make_record(row["spec"], JobSpec)
        if part:
            # The host only gives access to the boards after the first: the job runs on the first board's host, which
            # enforces the time limit, and reports after a check of its board.
            row["timeout_s"] += PROBE_SECONDS if spec.kind is Kind.COMMAND else 0
            spec = JobSpec(Kind.LEASE, {"purpose": title})
        more = [] if part else [one for one in parts if one["job"] == row["job_id"]]
        granted = tuple(_make_granted_lease(one, others[one["lease"]]) for one in more if one["lease"] in others)
        grants.append(Grant(**{**row, "spec": spec, "ttl_s": settings.lease_s, "more": granted}))
    return grants


def _make_granted_lease(part: Row, grant: Grant) -> GrantedLease:
    card = make_record(part["card"], BoardCard).replace(direct=part["direct"])
    return GrantedLease(grant, card, part["key"])


async def lease_of_job(tx: Tx, job_id: int) -> int | None:
    """Return the active lease of a job, or None."""
    query = "select id from hil.leases where job = %s and ended_at is null and part = 0"
    rows = await fetch_rows(tx, query, [job_id])
    return rows[0]["id"] if rows else None


async def read_holding(tx: Tx, lease: int) -> LeaseStatus | None:
    """Return the lease data for the holder that the grant does not contain, or None if the lease has ended."""
    query = (
        "select lease.key, lease.direct, board.card, not exists (select from hil.leases as part"
        " where part.job = lease.job and part.ended_at is null and part.started_at is null) as started"
        " from hil.leases as lease join hil.boards as board on board.name = lease.board"
        " where lease.id = %s and lease.ended_at is null"
    )
    rows = await fetch_rows(tx, query, [lease])
    return LeaseStatus(**{**rows[0], "card": make_record(rows[0]["card"], BoardCard)}) if rows else None


async def process_beats(tx: Tx, given: Sequence[WorkerBeat], settings: FarmSettings) -> list[BeatReply]:
    """Process heartbeats: extend the ownership of boards and the expiry of leases."""
    boards, workers = [one.board for one in given], [one.worker for one in given]
    pairs = [(lease, one.worker) for one in given for lease in one.leases]
    kept = {"leases": [lease for lease, _ in pairs], "workers": [worker for _, worker in pairs]}
    async with tx.pipeline():
        await tx.execute(_EXTEND_OWNED, {"boards": boards, "workers": workers, "owner_s": settings.owner_s})
        owners = await tx.execute("select name, worker from hil.boards where name = any(%s)", [boards])
        if pairs:
            await tx.execute(_KEEP, {**kept, "lease_s": settings.lease_s})
        owner = {row["name"]: row["worker"] for row in await owners.fetchall()}
    ended = await find_ended(tx, pairs)
    return [
        BeatReply(
            owner=owner.get(one.board) == one.worker,
            vacant=owner.get(one.board) == "",
            over={lease: ended[lease, one.worker] for lease in one.leases if (lease, one.worker) in ended},
        )
        for one in given
    ]


async def find_ended(tx: Tx, pairs: Sequence[tuple[int, str]]) -> dict[tuple[int, str], str]:
    """Return (lease, worker) -> reason for leases that have ended or belong to a different worker."""
    if not pairs:
        return {}
    values = {"leases": [lease for lease, _ in pairs], "workers": [worker for _, worker in pairs]}
    rows = await fetch_rows(tx, _OVER, values)
    return {(row["lease"], row["worker"]): row["reason"] for row in rows}


async def record_start(tx: Tx, lease: int, worker: str, direct: str) -> None:
    """Record that a lease's board session is open.

    Args:
        direct: agent address for a holder on the same machine.
    """
    async with tx.pipeline():
        begun = await fetch_rows(tx, _STARTED, {"lease": lease, "worker": worker, "direct": direct})
        row = await lease_row(tx, lease) if begun else None
        if row is not None:
            await note_started(tx, row)


@serialize_calls
async def report(
    tx: Tx, queue: LeaseQueue, lease: int, worker: str, result: JobResult, fence: int, settings: FarmSettings
) -> tuple[bool, str]:
    """Record the result of a lease's job.

    Late results do not count. The farm logs an invalid fence, but does not store it, and the result still counts.

    Args:
        fence: highest fence that the board has accepted.

    Returns:
        True if the result counted; otherwise False and the reason.
    """
    result = normalize_document(result)
    row = await lease_row(tx, lease)
    if row is None or row.worker != worker:
        return False, "this lease was not granted to this worker"
    if row.ended_at is not None:
        return await _handle_repeated_report(tx, row, result)
    if 0 <= fence < MAX_FENCE:
        await tx.execute("update hil.boards set fence = greatest(fence, %s) where name = %s", [fence, row.board])
    else:
        await note_board(tx, "fence", row.board, f"ignored invalid fence {fence} from the host")
    await transitions.lease_reported(tx, queue, row, result, settings)
    # After an infrastructure failure, the job may move to any board. After a health job, jobs that had to avoid this
    # board may use it again. So look for grants on all boards.
    everywhere = result.infrastructure or row.job.kind is Kind.HEALTH or row.job.boards > 1
    await grant_boards(tx, queue, settings, None if everywhere else [row.board])
    return True, ""


async def _handle_repeated_report(tx: Tx, row: LeaseRow, result: JobResult) -> tuple[bool, str]:
    """Handle a report for an ended lease.

    A repetition of the stored result counts; a different, late result does not.
    """
    # Compare in the database: numbers may change their notation in jsonb.
    [stored] = await fetch_rows(tx, _IS_SAME_RESULT, {"lease": row.id, "result": as_json(result.to_json())})
    if stored["same"]:
        return True, ""
    reason = "result already recorded" if row.result is not None else row.reason
    late = f"{reason}; ignored late result: {result.outcome or result.exit_code} {result.reason}"
    await note_lease(tx, "late_report", row, late.strip())
    return False, f"the lease has ended: {reason}"


async def renew_holder(tx: Tx, lease: int, key: str, settings: FarmSettings) -> bool:
    """Extend a lease for the holder. Returns False if the lease has ended or the key is wrong."""
    values = {"lease": lease, "key": key, "holder_s": settings.holder_s}
    return bool(await fetch_rows(tx, _HOLD, values))


async def end_of(tx: Tx, lease: int, key: str) -> str | None:
    """Return why a lease ended, or None if no lease has this key."""
    rows = await fetch_rows(tx, "select reason, key from hil.leases where id = %s", [lease])
    if not rows or not key or not hmac.compare_digest(rows[0]["key"].encode(), key.encode()):
        return None
    return rows[0]["reason"] or "ended"


async def wait_for_start(tx: Tx, lease: int, settings: FarmSettings) -> None:
    """Extend a holder's deadline while the board is being prepared."""
    await tx.execute(_READYING, {"lease": lease, "holder_s": settings.holder_s})


@serialize_calls
async def release(tx: Tx, queue: LeaseQueue, lease: int, key: str, reason: str, settings: FarmSettings) -> None:
    """Return a lease's board. An ended lease is not an error. Raises AccessRefused if the key is wrong."""
    row = await lease_row(tx, lease)
    if row is None or row.job.kind is not Kind.LEASE or not hmac.compare_digest(row.key.encode(), key.encode()):
        raise AccessRefused(f"invalid key for lease {lease}")
    if row.ended_at is None:
        await transitions.lease_over(tx, queue, row, JobResult(EXIT_OK, reason=make_storable(reason)), settings)
        await grant_boards(tx, queue, settings, [row.board] if row.job.boards == 1 else None)

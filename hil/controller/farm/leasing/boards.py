"""Boards of the farm: attach, change owner, drain, resume and forget."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from hil.controller.farm.database.database import Tx
from hil.controller.farm.leasing import transitions
from hil.controller.farm.leasing.allocator import grant_boards, list_queued_lanes
from hil.controller.farm.leasing.lease_queue import LeaseQueue
from hil.controller.farm.leasing.leases import find_ended, read_grants
from hil.controller.farm.leasing.transitions import finish
from hil.controller.farm.messages import (
    MAX_FENCE,
    BoardCard,
    BoardState,
    Grant,
    JobResult,
    Kind,
    Principal,
)
from hil.controller.farm.scheduler import health
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store import presence
from hil.controller.farm.store.event_log import note_board
from hil.controller.farm.store.records import (
    Row,
    as_json,
    fetch_rows,
    lock_active_leases,
    lock_job_rows,
    make_storable,
    read_access,
    read_board_rows,
    serialize_calls,
)
from hil.errors import EXIT_BOARD, EXIT_USAGE, UsageError, did_you_mean

_MAX_REASON = 500
_NEW = """
    insert into hil.boards (name, card, state, reason) values (%s, '{}', 'offline', 'new')
    on conflict (name) do update set name = excluded.name
    returning host, worker, fence, coalesce(card -> 'access', '{}') as access
"""
# The query locks rows, so it waits for concurrent heartbeats. now() is the transaction's start: see `.sweeper`.
_SILENT = "select name, host from hil.boards where worker <> '' and owned_until < now() order by name for update"
_PRESENT = """
    update hil.boards
    set card = %(card)s, site = %(site)s, host = %(host)s, hw_type = %(hw_type)s, labels = %(labels)s,
        fence = greatest(fence, %(fence)s), worker = %(worker)s, forgotten = false,
        owned_until = clock_timestamp() + make_interval(secs => %(owner_s)s)
    where name = %(name)s
"""


@dataclass(frozen=True)
class AttendReply:
    """Reply to a worker that presents a board."""

    owner: bool  # True for the owner, False for a standby worker
    over: dict[int, str] = field(default_factory=dict)  # reported leases that have ended -> reason
    grants: list[Grant] = field(default_factory=list)  # active leases of the board that the worker does not know


@serialize_calls
async def attach_worker(
    tx: Tx, queue: LeaseQueue, card: BoardCard, worker: str, leases: Collection[int], settings: FarmSettings
) -> AttendReply:
    """Attach a worker to a board. The worker becomes the owner unless a worker of a different host owns the board."""
    [board] = await fetch_rows(tx, _NEW, [card.name])
    if board["fence"] < 0:
        raise UsageError(
            f"invalid stored fence of {card.name}: the board cannot be used",
            hint=f"an admin can reset the fence: hil farm forget {card.name}",
        )
    known = await find_ended(tx, [(lease, worker) for lease in leases])
    ended = {lease: reason for (lease, _), reason in known.items()}
    if board["worker"] not in ("", worker) and board["host"] != card.host:
        return AttendReply(
            owner=False, over={**dict.fromkeys(leases, f"the host {board['host']} already serves the board"), **ended}
        )
    await presence.note_host_attends(tx, card.host)
    if board["worker"] not in ("", worker):
        # A restarted worker of the same host replaces the old worker immediately.
        await _set_offline(tx, queue, card.name, "the host started a new worker for the board", settings)
    await _store_board(tx, card, worker, settings)
    if read_access(board["access"]) != card.access:
        await _change_access(tx, card, settings)
    [presented] = await read_board_rows(tx, settings, [card.name])
    seen = health.Event(health.EventKind.ATTENDED, checked=not presented.unchecked)
    await transitions.change_board(tx, card.name, seen, settings)
    unknown = [one.id for one in await lock_active_leases(tx, "lease.board = %(board)s", {"board": card.name})]
    grants = await read_grants(tx, set(unknown) - set(leases), settings)
    await grant_boards(tx, queue, settings)
    return AttendReply(owner=True, over=ended, grants=grants)


@serialize_calls
async def leave(tx: Tx, queue: LeaseQueue, name: str, worker: str, settings: FarmSettings) -> None:
    """Detach a worker that an operator stopped: set the board offline and requeue the job."""
    for row in await fetch_rows(tx, "select host from hil.boards where name = %s and worker = %s", [name, worker]):
        await _set_offline(tx, queue, name, f"the host {row['host']} was stopped", settings, interrupted=True)
        await presence.note_hosts_gone(tx, "stopped", [row["host"]], "shut down")
        await grant_boards(tx, queue, settings)


@serialize_calls
async def detach_all(tx: Tx, queue: LeaseQueue, reason: str, settings: FarmSettings) -> None:
    """Detach all workers: set their boards offline and requeue their jobs, without counting the attempts."""
    for row in await fetch_rows(tx, "select name from hil.boards where worker <> '' order by name"):
        await _set_offline(tx, queue, row["name"], reason, settings, interrupted=True)


@serialize_calls
async def drain_board(tx: Tx, who: Principal, name: str, reason: str) -> None:
    """Drain a board: the current job may finish, no new job starts. Raises UsageError for an unknown board."""
    await get_board_state(tx, name)
    note = make_storable(f"by {who.user}{f': {reason}' if reason else ''}")
    await tx.execute(
        "update hil.boards set hold = 'draining', hold_reason = %s where name = %s", [f"drained {note}", name]
    )
    await note_board(tx, "draining", name, note)
    await transitions.call_off_check(tx, name, f"drained {note}")
    if not await lock_active_leases(tx, "lease.board = %(board)s", {"board": name}):
        await note_board(tx, "maintenance", name, "drained and idle")


@serialize_calls
async def resume(tx: Tx, queue: LeaseQueue, who: Principal, name: str, settings: FarmSettings) -> None:
    """Resume a drained board. If the board is not online, the farm checks the board immediately."""
    state = await get_board_state(tx, name)
    note = f"by {who.user}"
    await tx.execute("update hil.boards set hold = '', hold_reason = '' where name = %s", [name])
    await note_board(tx, "resumed", name, note)
    if state is not BoardState.ONLINE:
        await transitions.change_board(tx, name, health.Event(health.EventKind.RETRY, f"resumed {note}"), settings)
    await grant_boards(tx, queue, settings)


async def _change_access(tx: Tx, card: BoardCard, settings: FarmSettings) -> None:
    """Record who may use a board from now on. Queued jobs that may no longer use any board end."""
    allowed = [*card.access.users, *(f"group {group}" for group in card.access.groups)]
    await note_board(tx, "access", card.name, f"open to {', '.join(allowed) or 'all users'}"[:_MAX_REASON])
    known = await read_board_rows(tx, settings)
    reason = f"the user may no longer use {card.name}, and no other board matches"
    refused = [
        lane.lane
        for lane in await list_queued_lanes(tx)
        if not lane.matches_all(known) and replace(lane, kind=Kind.HEALTH).matches_all(known)
    ]
    for job in await lock_job_rows(tx, "job.state = 'queued' and job.lane = any(%s)", [refused]):
        await finish(tx, job, JobResult(EXIT_USAGE, reason=reason))


async def set_silent_offline(tx: Tx, queue: LeaseQueue, settings: FarmSettings) -> int:
    """Set boards without heartbeats offline. Returns their number."""
    silent = await fetch_rows(tx, _SILENT)
    for row in silent:
        await _set_offline(tx, queue, row["name"], f"no heartbeat from the host for {settings.owner_s:g} s", settings)
    hosts = {row["host"] for row in silent}
    await presence.note_hosts_gone(tx, "lost", hosts, f"no heartbeat for {settings.owner_s:g} s")
    return len(silent)


async def _set_offline(
    tx: Tx, queue: LeaseQueue, name: str, reason: str, settings: FarmSettings, *, interrupted: bool = False
) -> None:
    """Remove a board's owner and end the lease."""
    for lease in await lock_active_leases(tx, "lease.board = %(board)s", {"board": name}):
        await transitions.lease_lost(tx, queue, lease, reason, settings, interrupted=interrupted)
    await tx.execute("update hil.boards set worker = '', owned_until = clock_timestamp() where name = %s", [name])
    await transitions.change_board(tx, name, health.Event(health.EventKind.LOST, reason), settings)


async def _store_board(tx: Tx, card: BoardCard, worker: str, settings: FarmSettings) -> None:
    place: Row = {"name": card.name, "site": card.site, "host": card.host, "hw_type": card.hw_type}
    labels = as_json({**card.to_json()["labels"], **place})
    values = {**place, "card": as_json(card.to_json()), "labels": labels, "fence": card.fence, "worker": worker}
    await tx.execute(_PRESENT, {**values, "owner_s": settings.owner_s})


async def get_board_state(tx: Tx, name: str) -> BoardState:
    """Return the state of a board. Raises UsageError for an unknown name."""
    rows = await fetch_rows(tx, "select name, state from hil.boards where not forgotten")
    states = {row["name"]: BoardState(row["state"]) for row in rows}
    if name not in states:
        hint = f"{did_you_mean(name, states)}hil farm boards lists all boards"
        raise UsageError(f"board {name!r} not found", hint=hint)
    return states[name]


# If a host presents a forgotten board again, the board starts without health data and is not drained.
_FORGET = """
    update hil.boards
    set forgotten = true, hold = '', hold_reason = '', reason = '', failures = 0, checked_at = null, check_at = null,
        warm = '{}',
        fence = case when fence >= 0 then fence else coalesce(
            (select max(lease.fence) from hil.leases as lease where lease.board = name and lease.fence < %(most)s), 0)
        end
    where name = any(%(names)s)
    returning name, fence, (select before.fence from hil.boards as before where before.name = boards.name) as was
"""
_OWNER = "select host from hil.boards where name = %s and worker <> ''"
_ABSENT = """
    select name from hil.boards
    where state = 'offline' and hold = '' and worker = '' and not forgotten
        and coalesce(owned_until, added_at) < clock_timestamp() - make_interval(secs => %s)
    order by name
"""


@serialize_calls
async def forget(tx: Tx, who: Principal, name: str, settings: FarmSettings) -> list[str]:
    """Forget a board. Jobs that no other board can run end. Returns the names of these jobs."""
    await get_board_state(tx, name)
    if owners := await fetch_rows(tx, _OWNER, [name]):
        raise UsageError(
            f"{name} is still served by {owners[0]['host']}", hint="stop that host first, or use hil farm drain"
        )
    return await _forget_boards(tx, [name], f"by {who.user}", settings)


@serialize_calls
async def forget_absent(tx: Tx, absent_s: float, settings: FarmSettings) -> list[str]:
    """Forget boards that have been absent for ``absent_s`` seconds, except drained ones. Returns their names."""
    names = [row["name"] for row in await fetch_rows(tx, _ABSENT, [absent_s])]
    if names:
        await _forget_boards(tx, names, "no longer served by any host", settings)
    return names


async def _forget_boards(tx: Tx, names: Sequence[str], reason: str, settings: FarmSettings) -> list[str]:
    gone = await read_board_rows(tx, settings, names)
    for row in await fetch_rows(tx, _FORGET, {"names": list(names), "most": MAX_FENCE}):
        reset = f"; invalid fence reset to {row['fence']}" if row["was"] < 0 else ""
        await note_board(tx, "forgotten", row["name"], f"{reason}{reset}")
    left = await read_board_rows(tx, settings)
    lost = [
        lane.lane
        for lane in await list_queued_lanes(tx)
        if any(lane.matches(one) for one in gone) and not lane.matches_all(left)
    ]
    ended = await lock_job_rows(tx, "job.state = 'queued' and job.lane = any(%s)", [lost])
    what = f"no board matches after the removal of {', '.join(names)}"
    for job in ended:
        await finish(tx, job, JobResult(EXIT_BOARD, "BOARD_LOST", what, infrastructure=True))
    return [job.name for job in ended]

"""Boards come, go, change hands, are held back, and are forgotten: then nothing waits for them any more."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hil.controller.farm.messages import MOST_FENCE, BoardCard, BoardState, Grant, JobResult, Principal
from hil.controller.farm.scheduler import health
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store import transitions
from hil.controller.farm.store.allocator import grant, queued_lanes
from hil.controller.farm.store.database import Tx
from hil.controller.farm.store.event_log import note_board
from hil.controller.farm.store.lease_queue import LeaseQueue
from hil.controller.farm.store.leases import grants_of, over
from hil.controller.farm.store.records import (
    Row,
    active_leases,
    as_json,
    board_rows,
    fetched,
    job_rows,
    serialized,
    storable,
)
from hil.controller.farm.store.transitions import finish
from hil.errors import EXIT_BOARD, UsageError, did_you_mean

_NEW = """
    insert into hil.boards (name, card, state, reason) values (%s, '{}', 'offline', 'new')
    on conflict (name) do update set name = excluded.name
    returning host, worker, fence
"""
# Whoever is just heard of is waited for; and see `.ticking`: when the transaction began.
_SILENT = "select name from hil.boards where worker <> '' and owned_until < now() order by name for update"
_PRESENT = """
    update hil.boards
    set card = %(card)s, site = %(site)s, host = %(host)s, hw_type = %(hw_type)s, labels = %(labels)s,
        fence = greatest(fence, %(fence)s), worker = %(worker)s, forgotten = false,
        owned_until = clock_timestamp() + make_interval(secs => %(owner_s)s)
    where name = %(name)s
"""


@dataclass(frozen=True)
class AttendReply:
    """What a worker that presents its board is answered."""

    owner: bool  # whether the board is its own now; else it stands by
    over: dict[int, str] = field(default_factory=dict)  # of the leases that it works on, those that are over, and why
    grants: list[Grant] = field(default_factory=list)  # the leases of its board that it does not know of


@serialized
async def attend(
    tx: Tx, queue: LeaseQueue, card: BoardCard, worker: str, leases: Collection[int], settings: FarmSettings
) -> AttendReply:
    """A worker presents its board: it owns the board from now on, unless another is still heard of."""
    [board] = await fetched(tx, _NEW, [card.name])
    if board["fence"] < 0:
        raise UsageError(
            f"the fence that the farm has kept of {card.name} makes no sense, so nobody may have the board",
            hint=f"an admin mends it: hil farm forget {card.name}",
        )
    known = await over(tx, [(lease, worker) for lease in leases])
    ended = {lease: reason for (lease, _), reason in known.items()}
    if board["worker"] not in ("", worker):
        if board["host"] != card.host:
            return AttendReply(owner=False, over={**dict.fromkeys(leases, f"{board['host']} has the board"), **ended})
        # The worker that a host starts anew follows its former one at once.
        await _lose(tx, queue, card.name, "its host has started another worker for it", settings)
    await _present(tx, card, worker, settings)
    [presented] = await board_rows(tx, settings, [card.name])
    seen = health.Event(health.EventKind.ATTENDED, checked=not presented.unchecked)
    await transitions.change_board(tx, card.name, seen, settings)
    unknown = [one.id for one in await active_leases(tx, "lease.board = %(board)s", {"board": card.name})]
    grants = await grants_of(tx, set(unknown) - set(leases), settings)
    await grant(tx, queue, settings)
    return AttendReply(owner=True, over=ended, grants=grants)


@serialized
async def leave(tx: Tx, queue: LeaseQueue, name: str, worker: str, settings: FarmSettings) -> None:
    """A worker takes its leave: its board is offline at once, and what it had to do goes elsewhere."""
    if await fetched(tx, "select from hil.boards where name = %s and worker = %s", [name, worker]):
        await _lose(tx, queue, name, "its worker was stopped", settings)
        await grant(tx, queue, settings)


@serialized
async def drain(tx: Tx, who: Principal, name: str, reason: str) -> None:
    """Hold a board back: what runs on it may end, nothing new begins; UsageError where there is no such board."""
    await known_board(tx, name)
    note = storable(f"by {who.user}{f': {reason}' if reason else ''}")
    await tx.execute("update hil.boards set hold = 'draining', reason = %s where name = %s", [f"drained {note}", name])
    await note_board(tx, "draining", name, note)
    await transitions.call_off_check(tx, name, f"drained {note}")
    if not await active_leases(tx, "lease.board = %(board)s", {"board": name}):
        await note_board(tx, "maintenance", name, "drained, and nothing runs on it")


@serialized
async def resume(tx: Tx, queue: LeaseQueue, who: Principal, name: str, settings: FarmSettings) -> None:
    """Give a board back to the farm; one that is in quarantine is checked at once."""
    state = await known_board(tx, name)
    note = f"by {who.user}"
    await tx.execute("update hil.boards set hold = '', reason = '' where name = %s", [name])
    await note_board(tx, "resumed", name, note)
    if state is not BoardState.ONLINE:
        await transitions.change_board(tx, name, health.Event(health.EventKind.RETRY, f"resumed {note}"), settings)
    await grant(tx, queue, settings)


async def lose_silent(tx: Tx, queue: LeaseQueue, settings: FarmSettings) -> int:
    """Boards whose workers are not heard of any more are offline; returns how many."""
    silent = await fetched(tx, _SILENT)
    for row in silent:
        await _lose(tx, queue, row["name"], f"its host was not heard of for {settings.owner_s:g} s", settings)
    return len(silent)


async def _lose(tx: Tx, queue: LeaseQueue, name: str, reason: str, settings: FarmSettings) -> None:
    """A board's worker is gone: so is its lease, and nobody owns the board."""
    for lease in await active_leases(tx, "lease.board = %(board)s", {"board": name}):
        await transitions.lease_lost(tx, queue, lease, reason, settings)
    await tx.execute("update hil.boards set worker = '', owned_until = clock_timestamp() where name = %s", [name])
    await transitions.change_board(tx, name, health.Event(health.EventKind.LOST, reason), settings)


async def _present(tx: Tx, card: BoardCard, worker: str, settings: FarmSettings) -> None:
    place: Row = {"name": card.name, "site": card.site, "host": card.host, "hw_type": card.hw_type}
    labels = as_json({**card.to_json()["labels"], **place})
    values = {**place, "card": as_json(card.to_json()), "labels": labels, "fence": card.fence, "worker": worker}
    await tx.execute(_PRESENT, {**values, "owner_s": settings.owner_s})


async def known_board(tx: Tx, name: str) -> BoardState:
    """How a board is; UsageError where there is none of this name."""
    rows = await fetched(tx, "select name, state from hil.boards where not forgotten")
    states = {row["name"]: BoardState(row["state"]) for row in rows}
    if name not in states:
        hint = f"{did_you_mean(name, states)}hil farm boards lists them"
        raise UsageError(f"the farm has no board {name!r}", hint=hint)
    return states[name]


# One that is presented again is new: nothing is known of its health, and nobody holds it back.
_FORGET = """
    update hil.boards
    set forgotten = true, hold = '', reason = '', failures = 0, checked_at = null, check_at = null, warm = '{}',
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


@serialized
async def forget(tx: Tx, who: Principal, name: str, settings: FarmSettings) -> list[str]:
    """Forget a board; jobs that only it would have done have ended, and their names are returned."""
    await known_board(tx, name)
    if owners := await fetched(tx, _OWNER, [name]):
        raise UsageError(
            f"{name} is not gone: {owners[0]['host']} presents it", hint="end that host first, or hil farm drain it"
        )
    return await _forget(tx, [name], f"by {who.user}", settings)


@serialized
async def forget_absent(tx: Tx, absent_s: float, settings: FarmSettings) -> list[str]:
    """Forget the boards that no host has presented for so long, but for those that somebody drained; their names."""
    names = [row["name"] for row in await fetched(tx, _ABSENT, [absent_s])]
    if names:
        await _forget(tx, names, "no host presents it any more", settings)
    return names


async def _forget(tx: Tx, names: Sequence[str], reason: str, settings: FarmSettings) -> list[str]:
    gone = await board_rows(tx, settings, names)
    for row in await fetched(tx, _FORGET, {"names": list(names), "most": MOST_FENCE}):
        mended = f"; its fence made no sense, and goes on after {row['fence']}" if row["was"] < 0 else ""
        await note_board(tx, "forgotten", row["name"], f"{reason}{mended}")
    left = await board_rows(tx, settings)
    lost = [
        lane.lane
        for lane in await queued_lanes(tx)
        if any(lane.matches(one.name, one.labels) for one in gone)
        and not any(lane.matches(one.name, one.labels) for one in left)
    ]
    ended = await job_rows(tx, "job.state = 'queued' and job.lane = any(%s)", [lost])
    what = f"no board of the farm would do any more, since it forgot {', '.join(names)}"
    for job in ended:
        await finish(tx, job, JobResult(EXIT_BOARD, "BOARD_LOST", what, infrastructure=True))
    return [job.name for job in ended]

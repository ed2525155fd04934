"""Boards come, go, change hands, and are held back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from hil.controller.farm import health
from hil.controller.farm.desk import conditions, ending
from hil.controller.farm.desk.database import Tx
from hil.controller.farm.desk.engine import Engine
from hil.controller.farm.desk.granting import grant
from hil.controller.farm.desk.leases import grants_of, over
from hil.controller.farm.desk.notes import note_board
from hil.controller.farm.desk.rows import active_leases, alone, as_json, fetched, storable
from hil.controller.farm.terms import Terms
from hil.controller.farm.words import MOST_FENCE, Bearer, BoardCard, BoardState, Grant
from hil.errors import UsageError, did_you_mean

_NEW = """
    insert into hil.boards (name, card, state, reason) values (%s, '{}', 'offline', 'new')
    on conflict (name) do update set name = excluded.name
    returning host, worker, fence
"""
_BOARD = "select host, worker from hil.boards where name = %s"
# Whoever is just heard of is waited for; and see `.ticking`: when the transaction began.
_SILENT = "select name from hil.boards where worker <> '' and owned_until < now() order by name for update"
_CHECKED = """
    select from hil.boards
    where name = %(board)s and checked_at > clock_timestamp() - make_interval(secs => %(health_every_s)s)
"""
_PRESENT = """
    update hil.boards
    set card = %(card)s, site = %(site)s, host = %(host)s, hw_type = %(hw_type)s, labels = %(labels)s,
        fence = greatest(fence, %(fence)s), worker = %(worker)s, forgotten = false,
        owned_until = clock_timestamp() + make_interval(secs => %(owner_s)s)
    where name = %(board)s
"""


@dataclass(frozen=True)
class Attendance:
    """What a worker that presents its board is answered.

    Attributes:
        owner: whether the board is its own now; else it stands by.
        over: of the leases that it works on, those that are over, and why.
        grants: the leases of its board that it does not know of.
    """

    owner: bool
    over: dict[int, str] = field(default_factory=dict)
    grants: list[Grant] = field(default_factory=list)


@alone
async def attend(
    tx: Tx, engine: Engine, card: BoardCard, worker: str, leases: Collection[int], terms: Terms
) -> Attendance:
    """A worker presents its board: it owns the board from now on, unless another is still heard of.

    Args:
        leases: those that it works on.

    Raises:
        UsageError: the card makes no sense, or what the farm has kept of the board's fence does not.
    """
    _check(card)
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
            return Attendance(owner=False, over={**dict.fromkeys(leases, f"{board['host']} has the board"), **ended})
        # The worker that a host starts anew follows its former one at once.
        await _lose(tx, engine, card.name, "its host has started another worker for it", terms)
    await _present(tx, card, worker, terms)
    seen = health.Event(health.What.ATTENDED, checked=await _checked(tx, card.name, terms))
    await conditions.change(tx, card.name, seen, terms)
    unknown = [one.id for one in await active_leases(tx, "lease.board = %(board)s", {"board": card.name})]
    grants = await grants_of(tx, set(unknown) - set(leases), terms)
    await grant(tx, engine, terms)
    return Attendance(owner=True, over=ended, grants=grants)


@alone
async def leave(tx: Tx, engine: Engine, name: str, worker: str, terms: Terms) -> None:
    """A worker takes its leave: its board is offline at once, and what it had to do goes elsewhere."""
    found = await fetched(tx, _BOARD, [name])
    if found and found[0]["worker"] == worker:
        await _lose(tx, engine, name, "its worker was stopped", terms)
        await grant(tx, engine, terms)


@alone
async def drain(tx: Tx, who: Bearer, name: str, reason: str) -> None:
    """Hold a board back: what runs on it may end, nothing new begins.

    Raises:
        UsageError: there is no such board.
    """
    await known_board(tx, name)
    said = storable(f"by {who.user}{f': {reason}' if reason else ''}")
    await tx.execute("update hil.boards set hold = 'draining', reason = %s where name = %s", [f"drained {said}", name])
    await note_board(tx, "draining", name, said)
    await conditions.call_off_check(tx, name, f"drained {said}")
    if not await active_leases(tx, "lease.board = %(board)s", {"board": name}):
        await note_board(tx, "maintenance", name, "drained, and nothing runs on it")


@alone
async def resume(tx: Tx, engine: Engine, who: Bearer, name: str, terms: Terms) -> None:
    """Give a board back to the farm; one that is in quarantine is checked at once.

    Raises:
        UsageError: there is no such board.
    """
    state = await known_board(tx, name)
    said = f"by {who.user}"
    await tx.execute("update hil.boards set hold = '', reason = '' where name = %s", [name])
    await note_board(tx, "resumed", name, said)
    if state is not BoardState.ONLINE:
        await conditions.change(tx, name, health.Event(health.What.RETRY, f"resumed {said}"), terms)
    await grant(tx, engine, terms)


async def lose_silent(tx: Tx, engine: Engine, terms: Terms) -> int:
    """Boards whose workers are not heard of any more are offline; returns how many."""
    silent = await fetched(tx, _SILENT)
    for row in silent:
        await _lose(tx, engine, row["name"], f"its host was not heard of for {terms.owner_s:g} s", terms)
    return len(silent)


async def _lose(tx: Tx, engine: Engine, name: str, reason: str, terms: Terms) -> None:
    """A board's worker is gone: so is its lease, and nobody owns the board."""
    for lease in await active_leases(tx, "lease.board = %(board)s", {"board": name}):
        await ending.lost(tx, engine, lease, reason, terms)
    await tx.execute("update hil.boards set worker = '', owned_until = clock_timestamp() where name = %s", [name])
    await conditions.change(tx, name, health.Event(health.What.LOST, reason), terms)


async def _present(tx: Tx, card: BoardCard, worker: str, terms: Terms) -> None:
    place = {"name": card.name, "site": card.site, "host": card.host, "hw_type": card.hw_type}
    values: Mapping[str, Any] = {
        **place,
        "board": card.name,
        "card": as_json(card.to_json()),
        "labels": as_json({**card.to_json()["labels"], **place}),
        "fence": card.fence,
        "worker": worker,
        "owner_s": terms.owner_s,
    }
    await tx.execute(_PRESENT, values)


async def _checked(tx: Tx, name: str, terms: Terms) -> bool:
    """Whether a board was seen to be healthy not long ago."""
    return bool(await fetched(tx, _CHECKED, {"board": name, "health_every_s": terms.health_every_s}))


async def known_board(tx: Tx, name: str) -> BoardState:
    """How a board is.

    Raises:
        UsageError: there is none of this name.
    """
    rows = await fetched(tx, "select name, state from hil.boards where not forgotten")
    states = {row["name"]: BoardState(row["state"]) for row in rows}
    if name not in states:
        hint = f"{did_you_mean(name, states)}hil farm boards lists them"
        raise UsageError(f"the farm has no board {name!r}", hint=hint)
    return states[name]


def _check(card: BoardCard) -> None:
    texts = (card.name, card.site, card.host, card.config, card.hw_type, card.direct, card.machine)
    if not all(isinstance(one, str) and "\x00" not in one for one in texts) or not card.name:
        raise UsageError("a board's card has texts, and a name")
    if not isinstance(card.labels, Mapping):
        raise UsageError(f"the labels of {card.name} are no table")
    if isinstance(card.fence, bool) or not isinstance(card.fence, int) or not 0 <= card.fence < MOST_FENCE:
        raise UsageError(f"{card.fence} is no fence of {card.name}")

"""Events for hosts and gateways that start, stop or fail. Informational only.

A host is present while a worker of the host owns a board. A gateway is present while it ticks.
"""

from __future__ import annotations

from collections.abc import Iterable

from hil.controller.farm.database.database import Tx
from hil.controller.farm.store.event_log import note_host
from hil.controller.farm.store.records import fetch_rows

# Interval between a gateway's heartbeats, and time without a heartbeat after which a gateway is lost, in seconds.
_SEEN_S, LOST_S = 5.0, 20.0
_BOARDS = """
    select count(*) as known, count(*) filter (where worker <> '') as owned from hil.boards
    where host = %s and not forgotten
"""
_GATEWAYS = "select name, extract(epoch from now() - seen_at)::float as silent_s from hil.gateways"
_SEEN = """
    insert into hil.gateways (name, seen_at) values (%s, now()) on conflict (name) do update set seen_at = now()
"""


async def note_host_attends(tx: Tx, host: str) -> None:
    """Record an event if a host has no owned board yet. Call it before a worker of the host becomes an owner."""
    [boards] = await fetch_rows(tx, _BOARDS, [host])
    if not boards["owned"]:
        back = f"reconnected; boards: {boards['known']}"
        await note_host(tx, "back" if boards["known"] else "new", host, back if boards["known"] else "")


async def note_hosts_gone(tx: Tx, what: str, hosts: Iterable[str], reason: str) -> None:
    """Record the event ``host.WHAT`` for each of these hosts without an owned board."""
    for host in sorted(set(hosts)):
        [boards] = await fetch_rows(tx, _BOARDS, [host])
        if not boards["owned"]:
            await note_host(tx, what, host, f"{reason}; boards offline: {boards['known']}")


async def record_gateway_start(tx: Tx, name: str) -> None:
    """Record the start of a gateway. If the row still exists, the earlier process failed."""
    known = {row["name"] for row in await fetch_rows(tx, _GATEWAYS)}
    await tx.execute(_SEEN, [name])
    failed = name in known
    await note_host(tx, "restarted" if failed else "started", name, "after a failure" * failed, kind="gateway")


async def record_gateway_stop(tx: Tx, name: str) -> None:
    """Record the shutdown of a gateway."""
    await tx.execute("delete from hil.gateways where name = %s", [name])
    await note_host(tx, "stopped", name, kind="gateway")


async def record_gateway_tick(tx: Tx, name: str, *, may_miss: bool) -> None:
    """Write a gateway's heartbeat, and record an event for each other gateway that is lost.

    Args:
        may_miss: True if the database has been available long enough for all gateways to write heartbeats.
    """
    silent_s = {row["name"]: row["silent_s"] for row in await fetch_rows(tx, _GATEWAYS)}
    own_s = silent_s.pop(name, None)
    if own_s is None or own_s >= _SEEN_S:
        await tx.execute(_SEEN, [name])
    if own_s is None:
        await note_host(tx, "back", name, kind="gateway")
    for other in [other for other, seconds in silent_s.items() if may_miss and seconds >= LOST_S]:
        if await fetch_rows(tx, "delete from hil.gateways where name = %s returning name", [other]):
            await note_host(tx, "lost", other, f"no heartbeat for {silent_s[other]:.0f} s", kind="gateway")

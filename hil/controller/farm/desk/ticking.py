"""What nobody's call brings about: leases and boards that time runs out for, checks that are due. Once a second."""

from __future__ import annotations

import time

from hil.controller.farm.desk import boards, conditions, ending
from hil.controller.farm.desk.database import Tx
from hil.controller.farm.desk.engine import Engine
from hil.controller.farm.desk.granting import grant
from hil.controller.farm.desk.rows import ALONE, active_leases, alone, fetched
from hil.controller.farm.terms import Terms

_TICK = 0x4_74_69_63_6B  # one gateway's tick is enough at a time
_FROZEN_S = 5.0

# A gateway that was frozen while it was alone, or had changed a board or a lease, holds up the whole farm. PostgreSQL's
# own limit for idle transactions does not see that: in the middle of a pipeline it takes the connection for active.
_THAW = """
    select pg_terminate_backend(pid) from pg_stat_activity
    where datname = current_database() and state = 'active' and wait_event_type = 'Client'
        and state_change < clock_timestamp() - make_interval(secs => %(frozen_s)s)
        and pid in (
            select pid from pg_locks
            where granted and database = (select oid from pg_database where datname = current_database()) and (
                relation in ('hil.boards'::regclass, 'hil.leases'::regclass) and mode = 'RowExclusiveLock'
                or locktype = 'advisory' and objsubid = 1
                    and (classid::bigint << 32 | objid::bigint) = %(alone)s))
"""


async def tick(tx: Tx, engine: Engine, terms: Terms, heard_since: float) -> int:
    """Let time pass; returns how much happened.

    Args:
        heard_since: `time.monotonic()` when this gateway began to hear workers and holders: its start, or the
            end of the database's last outage. Until all had the time to be heard, and to report what ended
            meanwhile, nothing expires. `math.inf` where that has not begun.
    """
    await thaw(tx)
    await tx.execute("set local lock_timeout = '5s'")
    [tried] = await fetched(tx, "select pg_try_advisory_xact_lock(%s) as ours", [_TICK])
    return await _pass(tx, engine, terms, heard_since) if tried["ours"] else 0


async def thaw(tx: Tx) -> None:
    """Let go of what a frozen gateway holds. Where all connections of a pool wait for that, by one beside the pool."""
    await tx.execute(_THAW, {"alone": ALONE, "frozen_s": _FROZEN_S})


@alone
async def _pass(tx: Tx, engine: Engine, terms: Terms, heard_since: float) -> int:
    happened = await _expired(tx, engine, terms) if time.monotonic() - heard_since >= terms.lease_s else 0
    happened += await conditions.order_checks(tx)
    return happened + len(await grant(tx, engine, terms))


async def _expired(tx: Tx, engine: Engine, terms: Terms) -> int:
    """End what nobody speaks for any more, and what took too long: when this transaction began, for its gateway may
    have been frozen since, and have heard nobody.
    """
    silent = await active_leases(tx, "lease.expires_at < now()")
    for lease in silent:
        reason = f"nothing was heard of it on {lease.board} for {terms.lease_s:g} s"
        await ending.lost(tx, engine, lease, reason, terms)
    left = await active_leases(tx, "lease.holder_until < now()")
    for lease in left:
        await ending.over(tx, engine, lease, f"its holder was not heard of for {terms.holder_s:g} s", terms)
    lost = await boards.lose_silent(tx, engine, terms)
    late = await active_leases(tx, "lease.until < now()")
    for lease in late:
        await ending.timed_out(tx, engine, lease, terms)
    return len(silent) + len(left) + lost + len(late)

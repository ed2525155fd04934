"""What nobody's call brings about: leases and boards that time runs out for, checks that are due. Once a second.

What is old is deleted: `hil farm gc`. The audit stays.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from hil.controller.farm.messages import JobResult
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store import boards, transitions
from hil.controller.farm.store.allocator import grant
from hil.controller.farm.store.database import Tx
from hil.controller.farm.store.lease_queue import LeaseQueue
from hil.controller.farm.store.records import SERIALIZED, active_leases, fetched, serialized
from hil.errors import EXIT_OK

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
                    and (classid::bigint << 32 | objid::bigint) = %(serialized)s))
"""


async def tick(tx: Tx, queue: LeaseQueue, settings: FarmSettings, heard_since: float) -> int:
    """Let time pass; returns how much happened.

    Until all workers and holders had the time to be heard, and to report what ended meanwhile, nothing expires:
    ``heard_since`` is when this gateway began to hear them, by `time.monotonic()` (`math.inf`: not yet).
    """
    await thaw(tx)
    await tx.execute("set local lock_timeout = '5s'")
    [tried] = await fetched(tx, "select pg_try_advisory_xact_lock(%s) as ours", [_TICK])
    return await _pass(tx, queue, settings, heard_since) if tried["ours"] else 0


async def thaw(tx: Tx) -> None:
    """Let go of what a frozen gateway holds. Where all connections of a pool wait for that, by one beside the pool."""
    await tx.execute(_THAW, {"serialized": SERIALIZED, "frozen_s": _FROZEN_S})


@serialized
async def _pass(tx: Tx, queue: LeaseQueue, settings: FarmSettings, heard_since: float) -> int:
    happened = await _expired(tx, queue, settings) if time.monotonic() - heard_since >= settings.lease_s else 0
    happened += await transitions.order_checks(tx)
    return happened + len(await grant(tx, queue, settings))


async def _expired(tx: Tx, queue: LeaseQueue, settings: FarmSettings) -> int:
    """End what nobody speaks for any more, and what took too long: when this transaction began, for its gateway may
    have been frozen since, and have heard nobody.
    """
    silent = await active_leases(tx, "lease.expires_at < now()")
    for lease in silent:
        reason = f"nothing was heard of it on {lease.board} for {settings.lease_s:g} s"
        await transitions.lease_lost(tx, queue, lease, reason, settings)
    left = await active_leases(tx, "lease.holder_until < now()")
    for lease in left:
        gone = JobResult(EXIT_OK, reason=f"its holder was not heard of for {settings.holder_s:g} s")
        await transitions.lease_over(tx, queue, lease, gone, settings)
    lost = await boards.lose_silent(tx, queue, settings)
    late = await active_leases(tx, "lease.until < now()")
    for lease in late:
        await transitions.lease_timed_out(tx, queue, lease, settings)
    return len(silent) + len(left) + lost + len(late)


# A file that came, or was asked for, so lately may be of an order that is still to come.
_GRACE = "1 day"
# So long after a user's last lease nothing is left of it in the sharing.
_FADED = "30 days"
# Files at a time: while they are deleted, whoever would use the very same ones waits.
_MOST_FILES = 2000

# All of its jobs have ended, and the last long ago.
_OLD = """
    select id from hil.submissions as submission
    where at < now() - make_interval(secs => %(keep_s)s) and not exists (
        select from hil.jobs where jobs.submission = submission.id and (
            state in ('queued', 'running') or finished_at >= now() - make_interval(secs => %(keep_s)s)))
"""
_OF_THEM = {"jobs": "hil.jobs"} | {
    table: f"hil.{table} join hil.jobs on jobs.id = {table}.job" for table in ("leases", "results", "logs")
}
_DELETED = {
    "submissions": "delete from hil.submissions where id = any(%(old)s)",
    "events": "delete from hil.events where at < now() - make_interval(secs => %(keep_s)s)",
}
# Boards that were taken away, and what users had of the boards so long ago that it has faded to nothing.
_DELETED_LAST = {
    "boards": "delete from hil.boards as board where state = 'offline' and worker = '' and hold = ''"
    " and (forgotten or coalesce(owned_until, added_at) < now() - make_interval(secs => %(keep_s)s))"
    " and not exists (select from hil.leases where leases.board = board.name)",
    "shares": f"delete from hil.shares where at < now() - greatest(make_interval(secs => %(keep_s)s), '{_FADED}')",
}
_UNUSED = f"""
    with used as (
        select value as digest from hil.jobs, jsonb_each_text(spec -> 'files')
        union select value from hil.results, jsonb_each_text(result -> 'files')
        union select value from hil.leases, jsonb_each_text(result -> 'files')
    ), unused as (
        select digest from hil.artifacts as artifact
        where used_at < now() - interval '{_GRACE}'
            and not exists (select from used where used.digest = artifact.digest)
        limit %(most)s for update skip locked
    )
    delete from hil.artifacts where digest in (select digest from unused) returning digest, size
"""


@dataclass(frozen=True)
class Cleaned:
    """What was deleted, or would be."""

    counts: dict[str, int]
    bytes: int = 0  # of the artifacts
    artifacts: list[str] = field(default_factory=list)  # digests of the files that nothing refers to any more


async def gc(
    tx: Tx, keep_s: float, delete: Callable[[list[str]], Awaitable[None]], *, dry_run: bool = False
) -> Cleaned:
    """Delete submissions that ended long ago with all that belongs to them, old events, boards that are gone, and
    files that nothing refers to (at most 2000 of them: to be called again).

    ``delete``, which takes files from the store, is called in the transaction: who wants one of them meanwhile waits,
    and is then told that it is lacking.
    """
    async with tx.transaction(force_rollback=dry_run):
        # The files may take their time.
        await tx.execute("set local idle_in_transaction_session_timeout = '10min'")
        old = [row["id"] for row in await fetched(tx, _OLD, {"keep_s": keep_s})]
        values = {"keep_s": keep_s, "old": old, "most": _MOST_FILES}
        counts = {}
        for name, tables in _OF_THEM.items():
            [row] = await fetched(tx, f"select count(*) as n from {tables} where submission = any(%(old)s)", values)
            counts[name] = row["n"]
        for name, query in _DELETED.items():
            counts[name] = (await tx.execute(query, values)).rowcount
        unused = await fetched(tx, _UNUSED, values)
        digests = [row["digest"] for row in unused]
        if digests and not dry_run:
            await delete(digests)
        # Not before the files, which may take long: who presents such a board waits, and the whole farm for them.
        for name, query in _DELETED_LAST.items():
            counts[name] = (await tx.execute(query, values)).rowcount
    return Cleaned({**counts, "artifacts": len(digests)}, sum(row["size"] for row in unused), digests)

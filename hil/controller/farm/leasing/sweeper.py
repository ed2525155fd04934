"""Periodic work, every second: expire leases and boards, and queue due health checks.

This module also deletes old data for `hil farm gc`. The audit is never deleted.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from hil.controller.farm.database.database import BACKUP_LOCK, Tx
from hil.controller.farm.leasing import boards, transitions
from hil.controller.farm.leasing.allocator import grant_boards
from hil.controller.farm.leasing.lease_queue import LeaseQueue
from hil.controller.farm.messages import JobResult
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store.records import SERIALIZED, fetch_rows, lock_active_leases, serialize_calls
from hil.errors import EXIT_OK, FarmError

_TICK = 0x4_74_69_63_6B  # advisory lock: only one gateway sweeps at a time
_FROZEN_SECONDS = 5.0

# A gateway blocks the whole farm if it freezes while it has the serialization lock, or while it changes a board or
# lease. PostgreSQL's timeout for idle transactions does not help, because a connection in pipeline mode counts as
# active.
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


async def run_periodic_work(tx: Tx, queue: LeaseQueue, settings: FarmSettings, heard_since: float) -> int:
    """Run the periodic work and return the number of changes.

    First, all workers and holders get time to send heartbeats and reports. Leases expire only after this time.

    Args:
        heard_since: `time.monotonic()` when this gateway began to receive heartbeats; `math.inf` if the gateway
            receives none.
    """
    await terminate_frozen(tx)
    await tx.execute("set local lock_timeout = '5s'")
    [tried] = await fetch_rows(tx, "select pg_try_advisory_xact_lock(%s) as ours", [_TICK])
    return await _sweep_once(tx, queue, settings, heard_since) if tried["ours"] else 0


async def terminate_frozen(tx: Tx) -> None:
    """Terminate connections of frozen gateways. Use a separate connection if the pool waits for their locks."""
    await tx.execute(_THAW, {"serialized": SERIALIZED, "frozen_s": _FROZEN_SECONDS})


@serialize_calls
async def _sweep_once(tx: Tx, queue: LeaseQueue, settings: FarmSettings, heard_since: float) -> int:
    happened = await _expire_leases(tx, queue, settings) if time.monotonic() - heard_since >= settings.lease_s else 0
    happened += await transitions.order_checks(tx)
    return happened + len(await grant_boards(tx, queue, settings))


async def _expire_leases(tx: Tx, queue: LeaseQueue, settings: FarmSettings) -> int:
    """End leases and boards without heartbeats, and leases past their time limit.

    Deadlines are compared with the start of the transaction. This gateway may have been frozen since then, and may have
    missed heartbeats.
    """
    silent = await lock_active_leases(tx, "lease.expires_at < now()")
    for lease in silent:
        reason = f"no heartbeat from {lease.board} for {settings.lease_s:g} s"
        await transitions.lease_lost(tx, queue, lease, reason, settings)
    left = await lock_active_leases(tx, "lease.holder_until < now()")
    for lease in left:
        gone = JobResult(EXIT_OK, reason=f"no heartbeat from the lease holder for {settings.holder_s:g} s")
        await transitions.lease_over(tx, queue, lease, gone, settings)
    lost = await boards.set_silent_offline(tx, queue, settings)
    late = await lock_active_leases(tx, "lease.until < now()")
    for lease in late:
        await transitions.lease_timed_out(tx, queue, lease, settings)
    return len(silent) + len(left) + lost + len(late)


# Unreferenced files are kept for this time, because they may belong to a submission that is not queued yet.
_GRACE = "1 day"
# After this time without leases, a user's share is negligible.
_FADED = "30 days"
# Limit of files per call: users of these files wait during the deletion.
_MAX_FILES = 2000

# Submissions of which all jobs ended long ago.
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
    "messages": "delete from hil.outbox where coalesce(sent_at, failed_at) < now() - make_interval(secs => %(keep_s)s)",
    "events": "delete from hil.events where at < now() - make_interval(secs => %(keep_s)s)",
    "reservations": "delete from hil.reservations where ends_at < now() - make_interval(secs => %(keep_s)s)",
}
# Removed boards, and board use that has decayed to almost zero.
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
class GcResult:
    """Numbers of rows that `gc` deleted, or would delete."""

    counts: dict[str, int]
    bytes: int = 0  # total size of the artifacts
    artifacts: list[str] = field(default_factory=list)  # digests of unreferenced files


async def delete_old(
    tx: Tx, keep_s: float, delete: Callable[[list[str]], Awaitable[None]], *, dry_run: bool = False
) -> GcResult:
    """Delete old submissions with their data, old events, removed boards and unreferenced files.

    Deletes at most 2000 files per call, so call it repeatedly.

    Args:
        delete: deletes files from the store. Called inside the transaction. Clients that need such a file wait for the
            end of the transaction, and then see that the file is missing.

    Raises:
        FarmError: a backup is running.
    """
    async with tx.transaction(force_rollback=dry_run):
        [lock] = await fetch_rows(tx, "select pg_try_advisory_xact_lock(%s) as free", [BACKUP_LOCK])
        if not lock["free"]:
            raise FarmError("a backup of the farm is running", hint="retry when hil farm backup has ended")
        # Deleting files may take long.
        await tx.execute("set local idle_in_transaction_session_timeout = '10min'")
        old = [row["id"] for row in await fetch_rows(tx, _OLD, {"keep_s": keep_s})]
        values = {"keep_s": keep_s, "old": old, "most": _MAX_FILES}
        counts = {}
        for name, tables in _OF_THEM.items():
            [row] = await fetch_rows(tx, f"select count(*) as n from {tables} where submission = any(%(old)s)", values)
            counts[name] = row["n"]
        for name, query in _DELETED.items():
            counts[name] = (await tx.execute(query, values)).rowcount
        unused = await fetch_rows(tx, _UNUSED, values)
        digests = [row["digest"] for row in unused]
        if digests and not dry_run:
            await delete(digests)
        # Delete these rows after the files, because deleting files may take long. A host that presents such a board
        # waits for the row's lock, and then the whole farm waits for the host.
        for name, query in _DELETED_LAST.items():
            counts[name] = (await tx.execute(query, values)).rowcount
    return GcResult({**counts, "artifacts": len(digests)}, sum(row["size"] for row in unused), digests)

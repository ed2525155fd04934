"""What is old is deleted: `hil farm gc`. The audit stays."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from hil.controller.farm.desk.database import Tx

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
    """What was deleted, or would be.

    Attributes:
        counts: rows by table.
        bytes: of the artifacts.
        artifacts: digests of the files that nothing refers to any more.
    """

    counts: dict[str, int]
    bytes: int = 0
    artifacts: list[str] = field(default_factory=list)


async def gc(
    tx: Tx, keep_s: float, delete: Callable[[list[str]], Awaitable[None]], *, dry_run: bool = False
) -> Cleaned:
    """Delete submissions that ended long ago with all that belongs to them, old events, boards that are gone, and
    files that nothing refers to (at most 2000 of them: to be called again).

    Args:
        keep_s: how long things are kept.
        delete: takes files from the store. It is called in the transaction: who wants one of them meanwhile waits,
            and is then told that it is lacking.
        dry_run: only count.
    """
    async with tx.transaction(force_rollback=dry_run):
        # The files may take their time.
        await tx.execute("set local idle_in_transaction_session_timeout = '10min'")
        asked = await tx.execute(_OLD, {"keep_s": keep_s})
        values = {"keep_s": keep_s, "old": [row["id"] for row in await asked.fetchall()], "most": _MOST_FILES}
        counts = {}
        for name, tables in _OF_THEM.items():
            asked = await tx.execute(f"select count(*) as n from {tables} where submission = any(%(old)s)", values)
            counts[name] = (await asked.fetchall())[0]["n"]
        for name, query in _DELETED.items():
            counts[name] = (await tx.execute(query, values)).rowcount
        unused = await (await tx.execute(_UNUSED, values)).fetchall()
        digests = [row["digest"] for row in unused]
        if digests and not dry_run:
            await delete(digests)
        # Not before the files, which may take long: who presents such a board waits, and the whole farm for them.
        for name, query in _DELETED_LAST.items():
            counts[name] = (await tx.execute(query, values)).rowcount
    return Cleaned({**counts, "artifacts": len(digests)}, sum(row["size"] for row in unused), digests)

"""Event log and job output.

Every change adds a row to the events. Listeners are notified when the transaction commits. Job output is stored in
the order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence

from hil.controller.farm.database.database import Tx
from hil.controller.farm.database.notifications import CHANNEL, publish_change
from hil.controller.farm.messages import JobState, Kind
from hil.controller.farm.store.records import NAME, JobRow, LeaseRow, Row, fetch_rows, make_storable
from hil.controller.records.lab.farm import LogPiece


async def _add_event(
    tx: Tx, what: str, *, board: str = "", job: str = "", lease: int | None = None, host: str = "", reason: str = ""
) -> None:
    query = "insert into hil.events (what, board, job, lease, host, reason) values (%s, %s, %s, %s, %s, %s)"
    await tx.execute(query, [what, board, job, lease, host, reason])


# Event of the log -> event of webhooks.
_ANNOUNCED = {
    "job.done": "job_ended",
    "job.cancelled": "job_ended",
    "board.quarantined": "board_quarantined",
    "host.lost": "host_lost",
}
_ANNOUNCE = """
    with added as (
        insert into hil.outbox (webhook, event, board, job, host, reason)
        select name, %(event)s, %(board)s, %(job)s, %(host)s, %(reason)s from hil.webhooks where %(event)s = any(events)
        returning id
    )
    select pg_notify(%(channel)s, %(change)s) from added limit 1
"""


async def _announce_event(
    tx: Tx, what: str, *, board: str = "", job: str = "", host: str = "", reason: str = ""
) -> None:
    """Add a message for every webhook that wants an event. Gateways deliver it after this transaction."""
    if (event := _ANNOUNCED.get(what)) is not None:
        values = {"event": event, "board": board, "job": job, "host": host, "reason": reason}
        await tx.execute(_ANNOUNCE, {**values, "channel": CHANNEL, "change": '{"kind": "webhook"}'})


async def _notify_job(tx: Tx, submission: int, job: int, name: str, state: JobState) -> None:
    await publish_change(tx, {"kind": "job", "submission": submission, "job": job, "name": name, "state": state.value})


async def note_board(tx: Tx, what: str, board: str, reason: str = "", *, is_new: bool = True) -> None:
    """Record a change of a board.

    Args:
        what: event name without prefix, such as ``suspect``.
        is_new: False if the board was in this state before, so that webhooks do not repeat it.
    """
    await _add_event(tx, f"board.{what}", board=board, reason=reason)
    if is_new:
        await _announce_event(tx, f"board.{what}", board=board, reason=reason)
    await publish_change(tx, {"kind": "board", "board": board})


async def note_host(tx: Tx, what: str, host: str, reason: str = "", *, kind: str = "host") -> None:
    """Record that a host or gateway (``kind``) started, stopped or failed. ``what`` is the event, such as ``lost``."""
    await _add_event(tx, f"{kind}.{what}", host=host, reason=reason)
    await _announce_event(tx, f"{kind}.{what}", host=host, reason=reason)


async def note_queued(tx: Tx, submission: int, jobs: Sequence[int], reason: str = "") -> None:
    """Record new jobs of a submission as one event."""
    await _add_event(tx, "job.queued", job=str(submission), reason=reason)
    await _notify_job(tx, submission, jobs[0], str(submission), JobState.QUEUED)


async def note_job(tx: Tx, what: str, job: JobRow, state: JobState, *, reason: str = "", board: str = "") -> None:
    """Record a change of a job. ``what`` is the event name without prefix, such as ``done``."""
    await _add_event(tx, f"job.{what}", board=board, job=job.name, reason=reason)
    if job.kind is not Kind.HEALTH:
        await _announce_event(tx, f"job.{what}", job=job.name, reason=reason)
    await _notify_job(tx, job.submission, job.id, job.name, state)


async def note_unrecorded(tx: Tx, job: str, reason: str) -> None:
    """Record that the history does not have all results or programs of a job."""
    await _add_event(tx, "job.unrecorded", job=job, reason=make_storable(reason))


async def note_granted(tx: Tx, leases: Sequence[Row]) -> None:
    """Record granted leases. Rows contain id, board, job, job name and submission."""
    for row in leases:
        await _add_event(tx, "job.granted", board=row["board"], job=row["name"], lease=row["id"])
        await _notify_job(tx, row["submission"], row["job"], row["name"], JobState.RUNNING)
        await publish_change(tx, {"kind": "board", "board": row["board"]})


async def note_lease(tx: Tx, what: str, lease: LeaseRow, reason: str = "") -> None:
    """Record a lease event that changes no state. ``what`` is the event name, such as ``late_report``."""
    await _add_event(tx, f"lease.{what}", board=lease.board, job=lease.job.name, lease=lease.id, reason=reason)


async def note_ended(tx: Tx, lease: LeaseRow, reason: str) -> None:
    """Record the end of a lease, and notify the board's worker and the holder."""
    await note_lease(tx, "ended", lease, reason)
    await publish_change(tx, {"kind": "ended", "lease": lease.id, "board": lease.board, "reason": reason})


async def note_started(tx: Tx, lease: LeaseRow) -> None:
    """Record that the board session of a lease is open."""
    await note_lease(tx, "started", lease)
    await publish_change(tx, {"kind": "started", "lease": lease.id})
    await _notify_job(tx, lease.job.submission, lease.job.id, lease.job.name, JobState.RUNNING)


# Limit of stored output per lease.
MAX_BYTES = 16 << 20
_TOO_MUCH = "\n[output limit exceeded; further output is dropped]\n"
_MAX_LINES = 2000
# Maximum output per read in bytes. A read returns at least one text, even above the limit.
_MAX_READ = 8 << 20
# Advisory lock for assigning log numbers in commit order, so that a reader never misses an earlier number.
_LOCK = 0x68696C02


async def append_output(tx: Tx, lease: int, text: str) -> None:
    """Store output of a lease's job, up to a limit."""
    text = make_storable(text)
    await tx.execute("select pg_advisory_xact_lock(%s)", [_LOCK])
    found = await fetch_rows(
        tx,
        "update hil.leases set printed = printed + %(size)s where id = %(lease)s and printed <= %(most)s"
        " returning job, printed > %(most)s as full",
        {"size": len(text.encode()), "lease": lease, "most": MAX_BYTES},
    )
    for row in found:
        kept = _TOO_MUCH if row["full"] else text
        await tx.execute("insert into hil.logs (job, lease, text) values (%s, %s, %s)", [row["job"], lease, kept])
        await publish_change(tx, {"kind": "log", "job": row["job"]})


async def read_output_after(
    tx: Tx, job_ids: Sequence[int], after: int = 0, *, limit: int = _MAX_LINES
) -> list[LogPiece]:
    """Return output of these jobs after a log number.

    A call returns a limited amount of output. To continue, call the function with the last number.
    """
    query = f"""
        with found as (
            select id, job, octet_length(text) as size from hil.logs
            where job = any(%s) and id > %s order by id limit %s
        ),
        summed as (select id, job, size, sum(size) over (order by id) as read from found)
        select log.id as number, {NAME} as job, log.text
        from summed join hil.logs as log on log.id = summed.id join hil.jobs as job on job.id = summed.job
        join hil.submissions as submission on submission.id = job.submission
        where summed.read - summed.size < %s order by log.id
    """
    return [LogPiece(**row) for row in await fetch_rows(tx, query, [list(job_ids), after, limit, _MAX_READ])]

"""Queries of a farm. :data:`hil.controller.records.lab.farm.ANSWERS` lists the result type of every query.

Lists are ordered from oldest to newest. If a list is cut, the oldest entries are missing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from hil.controller.farm.database.database import Tx
from hil.controller.farm.leasing import waiting_room
from hil.controller.farm.leasing.reservations import list_reservations
from hil.controller.farm.messages import BoardState, JobState, Principal, Priority, Right, parse_job
from hil.controller.farm.scheduler import outlook, policy
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store import case_results, event_log
from hil.controller.farm.store.board_access import list_permissions
from hil.controller.farm.store.records import JOBS, NAME, fetch_rows, make_storable, read_board_rows
from hil.controller.farm.webhooks.outbox import list_webhooks
from hil.controller.farm.webhooks.webhook_settings import FarmWebhook
from hil.controller.records.base import make_record
from hil.controller.records.lab.board_image import ProvisionedImage
from hil.controller.records.lab.farm import (
    AuditEntry,
    BoardUsers,
    FarmAttempt,
    FarmBoard,
    FarmCases,
    FarmEvent,
    FarmJob,
    FarmStats,
    FarmToken,
    FarmUser,
    JobDetails,
    JobResultRow,
    LogPiece,
    QueuedJob,
    QueuePercentiles,
    RequestedBoard,
    UserStats,
)
from hil.errors import UsageError, did_you_mean

_MAX_ROWS = 100_000
_USUAL = 200
_LAST_TIME = 1e11  # seconds since the epoch
# Limits that protect the gateway's memory: total characters in listed jobs' text fields, total bytes in results and
# specs, and jobs per page.
_MOST_TEXT, _MOST_RESULTS, _PAGE = 16 << 20, 64 << 20, 1000
_TEXTS = ("title", "selector", "project", "pinned", "board", "reason", "outcome")
# ``board`` is the last lease's board. For a job without a result, ``reason`` is the last failure's reason.
_QUERY = f"""
    select job.id, job.number, {NAME} as name, job.submission,
        coalesce(nullif(job.title, ''), submission.title) as title, job.kind, submission.project,
        submission.priority, submission.selector, job.state, job.attempts, submission.user_name as user,
        coalesce(lease.board, '') as board, submission.board as pinned, job.queued_at, job.started_at, job.finished_at,
        result.exit_code, coalesce(result.outcome, '') as outcome,
        coalesce(result.result ->> 'reason', lease.reason, '') as reason, submission.more,
        case when job.boards = 1 then '{{}}' else array(
            select board from (
                select board, part from hil.leases where leases.job = job.id order by leases.id desc limit job.boards
            ) as last order by part
        ) end as boards
    from {JOBS}
    left join hil.results as result on result.job = job.id
    left join lateral (
        select board, reason from hil.leases
        where leases.job = job.id and leases.part = 0 order by leases.id desc limit 1
    ) as lease on true
"""


async def ask(
    tx: Tx,
    what: str,
    arguments: Mapping[str, Any],
    settings: FarmSettings,
    who: Principal | None = None,
    webhooks: Sequence[FarmWebhook] = (),
) -> Any:
    """Run a query named by a field of ``AskRequest``. Raises UsageError for an unknown job or an invalid argument."""
    for name, value in arguments.items():
        if isinstance(value, str) and make_storable(value) != value:
            raise UsageError(f"unknown {name} {value!r}")
    more: dict[str, Any] = {"settings": settings} if what in ("stats", "queue") else {}
    more |= {"who": who} if what in ("me", "access") else {}
    more |= {"webhooks": webhooks} if what == "webhooks" else {}
    return await _ANSWERS[what](tx, **arguments, **more)


async def me(tx: Tx, who: Principal | None) -> FarmUser:
    """Return the caller's user, role and project."""
    assert who is not None
    rights = sorted(right.value for right in Right if who.has_right(right))
    return FarmUser(user=who.user, role=who.role.value, project=who.project, rights=rights, groups=sorted(who.groups))


async def jobs(
    tx: Tx,
    state: Sequence[str] = (),
    user: str = "",
    submission: int | None = None,
    limit: int = _USUAL,
    health: bool = False,
    before: str = "",
    failed: bool = False,
    since: float = 0.0,
) -> list[FarmJob]:
    """Return jobs of the farm.

    Args:
        health: include the farm's health jobs.
        before: only return jobs older than this job.
        failed: only return finished jobs without success.
        since: only return jobs queued after this time, in seconds since the epoch.
    """
    where, values = _select_jobs(state, user, failed=failed, since=since)
    where += ["job.kind <> 'health'"] if not health and submission is None else []
    where += ["job.submission = %(submission)s"] if submission is not None else []
    values["submission"] = submission
    if before:
        where.append("(job.submission, job.number) < (%(before_submission)s, %(before_number)s)")
        number_of_submission, number = parse_job(before)
        values |= {"before_submission": number_of_submission, "before_number": number or 1}
    return [FarmJob(**_format_job(row)) for row in await _read_newest_jobs(tx, where, values, _check_limit(limit))]


def _select_jobs(state: Sequence[str], user: str, *, failed: bool, since: float) -> tuple[list[str], dict[str, Any]]:
    """Return SQL conditions for jobs and their values."""
    if not 0 <= since < _LAST_TIME:
        raise UsageError(f"invalid time {since}: expected seconds since the epoch")
    states = _check_states(state)
    where = ["job.state = any(%(states)s)"] if states else []
    where += ["submission.user_name = %(user)s"] if user else []
    where += ["job.state = 'done' and result.exit_code <> 0"] if failed else []
    where += ["job.queued_at >= to_timestamp(%(since)s)"] if since else []
    return where, {"states": states, "user": user, "since": since}


def _check_states(state: Sequence[str]) -> list[str]:
    """Validate names of job states."""
    known = [one.value for one in JobState]
    if unknown := [one for one in state if one not in known]:
        raise UsageError(
            f"unknown job state {unknown[0]!r}", hint=f"{did_you_mean(unknown[0], known)}job states: {', '.join(known)}"
        )
    return list(state)


async def _read_newest_jobs(tx: Tx, where: list[str], values: Mapping[str, Any], limit: int) -> list[dict[str, Any]]:
    """Return the newest jobs, newest last. Raises UsageError if their text fields are too long in total."""
    found: list[dict[str, Any]] = []
    size, before = 0, 2**62
    conditions = " and ".join([*where, "job.id < %(before)s"])
    query = f"{_QUERY} where {conditions} order by job.id desc limit %(page)s"
    while len(found) < limit:
        page = min(_PAGE, limit - len(found))
        rows = await fetch_rows(tx, query, {**values, "before": before, "page": page})
        found += rows
        size += sum(len(row[name]) for row in rows for name in _TEXTS)
        if size > _MOST_TEXT:
            raise UsageError(
                f"the texts of these jobs exceed {_MOST_TEXT >> 20} million characters",
                hint="request fewer jobs with --limit N, or a job by name",
            )
        if len(rows) < page:
            break
        before = rows[-1]["id"]
    return found[::-1]


async def job(tx: Tx, name: str) -> JobDetails:
    """Return a job with all attempts. Raises UsageError if the name is unknown or matches multiple jobs."""
    found = await _find_jobs(tx, name)
    if len(found) > 1:
        raise UsageError(
            f"{name} has {len(found)} jobs", hint=f"use a job name from {found[0]['name']} to {found[-1]['name']}"
        )
    # An attempt has one lease per board. Interrupted attempts do not count, so their numbers repeat.
    query = (
        "select id as lease, part, board, fence, granted_at, started_at, ended_at, reason"
        " from (select *, (row_number() over (order by id) - 1) / %s as round from hil.leases where job = %s) as lease"
        " order by round, part"
    )
    attempts = await fetch_rows(tx, query, [1 + len(found[0]["more"]), found[0]["id"]])
    made = [FarmAttempt(**_format_row(row)) for row in attempts]
    return JobDetails(**_format_job(found[0]), attempts_made=made)


async def result(tx: Tx, name: str, specs: bool = False) -> list[JobResultRow]:
    """Return the results of a submission or a single job. A job without a result only has a name and a state.

    Args:
        specs: also return the ``spec`` of every job.
    """
    found = {row["id"]: row for row in await _find_jobs(tx, name)}
    joined = "hil.jobs as job left join hil.results as result on result.job = job.id where job.id = any(%s)"
    size = "coalesce(sum(octet_length(result.result::text)), 0) + coalesce(sum(octet_length(job.spec::text)), 0)"
    if len(found) > 1:
        [row] = await fetch_rows(tx, f"select {size} as size from {joined}", [list(found)])
        if row["size"] > _MOST_RESULTS:
            has, most = int(row["size"]) >> 20, _MOST_RESULTS >> 20
            raise UsageError(
                f"the results of {name} have {has} MiB; the limit is {most}",
                hint=f"request the jobs separately: {name}.1, ...",
            )
    spec = ", job.spec" if specs else ""
    rows = await fetch_rows(tx, f"select job.id, result.result{spec} from {joined} order by job.id", [list(found)])
    answers = []
    for row in rows:
        job, stored = found[row["id"]], row["result"] or {}
        # A gateway of a newer release may have stored more fields.
        values = {name: stored[name] for name in JobResultRow.__struct_fields__ if name in stored}
        values |= {"spec": row["spec"]} if specs else {}
        answers.append(JobResultRow(name=job["name"], state=job["state"], **values))
    return answers


async def cases(tx: Tx, name: str, limit: int = _USUAL) -> FarmCases:
    """Return the case results so far of a submission or a single job, failures first."""
    return await case_results.list_case_results(
        tx, [row["id"] for row in await _find_jobs(tx, name)], _check_limit(limit)
    )


# A submission's name matches all jobs of the submission.
_MATCHES_NAME = """exists (
    select from unnest(%(submissions)s::bigint[], %(numbers)s::int[]) as named (submission, number)
    where named.submission = job.submission and coalesce(named.number, job.number) = job.number)"""


async def queue(tx: Tx, settings: FarmSettings, limit: int = _USUAL, jobs: Sequence[str] = ()) -> list[QueuedJob]:
    """Return the waiting jobs in scheduling order, with position and waiting reason.

    Args:
        jobs: only return these jobs, at any position.
    """
    named = [parse_job(str(name)) for name in jobs]
    found = await waiting_room.list_outlooks(tx, settings, _MAX_ROWS if named else _check_limit(limit))
    where = ["job.id = any(%(ids)s)"]
    values: dict[str, Any] = {"ids": [one.job for one in found]}
    if named:
        where.append(_MATCHES_NAME)
        values |= {"submissions": [one for one, _ in named], "numbers": [number for _, number in named]}
    rows = {row["id"]: row for row in await _read_newest_jobs(tx, where, values, _MAX_ROWS)}
    # Skip jobs that have received a board in the meantime.
    told = [(rows[one.job], one) for one in found if one.job in rows]
    return [QueuedJob(**_format_job(row), position=one.position, why=one.why) for row, one in told]


# State for display: a drained board is ``draining`` while it has a job, and then in ``maintenance``.
_BOARD_STATE = "case when hold = '' then board.state when lease.id is null then 'maintenance' else 'draining' end"
# The drain reason takes precedence over later reasons.
_BOARD_REASON = "case when hold = '' then board.reason else board.hold_reason end"
_BOARDS = "hil.boards as board left join hil.leases as lease on lease.board = board.name and lease.ended_at is null"


async def boards(tx: Tx) -> list[FarmBoard]:
    """Return all boards."""
    query = f"""
        select board.name, board.site, board.host, board.hw_type, {_BOARD_REASON} as reason, board.labels,
            board.failures, board.warm, {_BOARD_STATE} as state, coalesce({NAME}, '') as job,
            coalesce(submission.user_name, '') as user, lease.granted_at as since, board.checked_at,
            coalesce(board.card -> 'power', '[]') as power, coalesce(board.card -> 'access', '{{}}') as access,
            coalesce(board.card -> 'provisions', 'false') as provisions, board.card -> 'image' as image
        from {_BOARDS} left join ({JOBS}) on job.id = lease.job where not board.forgotten order by board.name
    """
    rows = await fetch_rows(tx, query)
    return [
        FarmBoard(**{**_format_row(row), "access": _make_users(row["access"]), "image": _make_image(row["image"])})
        for row in rows
    ]


async def events(tx: Tx, board: str = "", job: str = "", limit: int = _USUAL) -> list[FarmEvent]:
    """Return the events of boards and jobs."""
    where = [f"{name} = %({name})s" for name, value in (("board", board), ("job", job)) if value]
    query = (
        "select id, at, what, board, job, lease, host, reason from hil.events"
        f" where {' and '.join(where) or 'true'} order by id desc limit %(limit)s"
    )
    rows = await fetch_rows(tx, query, {"board": board, "job": job, "limit": _check_limit(limit)})
    return [FarmEvent(**_format_row(row)) for row in reversed(rows)]


async def audit(tx: Tx, limit: int = _USUAL) -> list[AuditEntry]:
    """Return the audit: actions and refusals."""
    query = (
        'select id, at, user_name as "user", role, peer, action, object, allowed, detail'
        " from hil.audit order by id desc limit %(limit)s"
    )
    rows = await fetch_rows(tx, query, {"limit": _check_limit(limit)})
    return [AuditEntry(**_format_row(row)) for row in reversed(rows)]


async def tokens(tx: Tx) -> list[FarmToken]:
    """Return all tokens with their users, but without the secrets."""
    query = (
        'select id, user_name as "user", project, role, rights, groups, note, made_at, expires_at, revoked_at,'
        " revoked_at is null and (expires_at is null or expires_at > now()) as good from hil.tokens order by id"
    )
    return [FarmToken(**_format_row(row)) for row in await fetch_rows(tx, query)]


async def printed(tx: Tx, name: str, after: int = 0) -> list[LogPiece]:
    """Return the output of a submission or a single job after a log number."""
    ids = [row["id"] for row in await _find_jobs(tx, name)]
    return await event_log.read_output_after(tx, ids, after)


_JOB_COUNTS = "select state, count(*) as n from hil.jobs where kind <> 'health' group by state"
_MATCHING = f"select count(*) as n from {JOBS} left join hil.results as result on result.job = job.id where "
_BOARD_COUNTS = f"select {_BOARD_STATE} as state, count(*) as n from {_BOARDS} where not forgotten group by 1"
_QUEUE_COUNTS = f"""
    select submission.priority as state, count(*) as n from {JOBS}
    where job.state = 'queued' and job.kind <> 'health' group by 1
"""
# Median and 95th percentile of the queue times in the last hour.
_WAITED = """
    select percentile_cont(array[0.5, 0.95]) within group (order by extract(epoch from started_at - queued_at)) as s
    from hil.jobs where started_at > now() - interval '1 hour' and kind <> 'health'
"""
_USERS = f"""
    with open as (
        select submission.user_name, submission.project,
            count(*) filter (where job.state = 'running') as running,
            count(*) filter (where job.state = 'queued') as queued
        from {JOBS} where job.state in ('queued', 'running') and job.kind <> 'health' group by 1, 2
    )
    select user_name as "user", project, coalesce(running, 0) as running, coalesce(queued, 0) as queued,
        coalesce(hil.faded(share.board_s, share.at, %s), 0) as board_s
    from hil.shares as share full join open using (user_name, project)
    order by 1, 2
"""


async def stats(
    tx: Tx,
    settings: FarmSettings,
    state: Sequence[str] = (),
    user: str = "",
    failed: bool = False,
    since: float = 0.0,
) -> FarmStats:
    """Return statistics: jobs, boards and queue by state, queue times in seconds, and board use per user.

    ``matching`` counts the jobs that the other arguments select, as in :func:`jobs`.
    """
    where, values = _select_jobs(state, user, failed=failed, since=since)
    [waited] = await fetch_rows(tx, _WAITED)
    half, most = waited["s"] or (None, None)
    users = await fetch_rows(tx, _USERS, [settings.share_half_life_s])
    counts = await _read_counts(tx, _JOB_COUNTS, [state.value for state in JobState])
    matching = sum(counts.values())
    if where:
        [found] = await fetch_rows(tx, _MATCHING + " and ".join(["job.kind <> 'health'", *where]), values)
        matching = found["n"]
    return FarmStats(
        jobs=counts,
        matching=matching,
        boards=await _read_counts(tx, _BOARD_COUNTS, [state.value for state in BoardState]),
        queue=await _read_counts(tx, _QUEUE_COUNTS, [priority.value for priority in Priority]),
        waiting_s=QueuePercentiles(p50=_round_seconds(half), p95=_round_seconds(most)),
        users=[UserStats(**{**row, "board_s": _round_seconds(row["board_s"])}) for row in users],
    )


async def _read_counts(tx: Tx, query: str, known: list[str]) -> dict[str, int]:
    counts = {row["state"]: row["n"] for row in await fetch_rows(tx, query)}
    return {state: counts.get(state, 0) for state in known}


def _round_seconds(value: Any) -> float | None:
    return None if value is None else round(float(value), 3)


_ANSWERS: dict[str, Callable[..., Awaitable[Any]]] = {
    "jobs": jobs,
    "job": job,
    "result": result,
    "boards": boards,
    "events": events,
    "audit": audit,
    "stats": stats,
    "tokens": tokens,
    "logs": printed,
    "me": me,
    "queue": queue,
    "cases": cases,
    "reservations": list_reservations,
    "access": list_permissions,
    "webhooks": list_webhooks,
}


async def _find_jobs(tx: Tx, name: str) -> list[dict[str, Any]]:
    """Return the jobs with a name. Raises UsageError if there are no such jobs."""
    submission, number = parse_job(str(name))
    values = {"submission": submission, "number": number}
    only = "" if number is None else " and job.number = %(number)s"
    # Numbers outside the column's range cannot match.
    known = submission < 2**63 and (number or 0) < 2**31
    where = [f"job.submission = %(submission)s{only}"]
    found = await _read_newest_jobs(tx, where, values, _MAX_ROWS) if known else []
    if not found:
        raise UsageError(f"job {name} not found", hint="hil farm status lists all jobs; old jobs are deleted")
    return found


def _check_limit(limit: int) -> int:
    if not 0 < limit <= _MAX_ROWS:
        raise UsageError(f"limit must be a number from 1 to {_MAX_ROWS}, got {limit}")
    return limit


def _format_job(row: Mapping[str, Any]) -> dict[str, Any]:
    more = [RequestedBoard(**one) for one in row["more"]]
    return _format_row({key: value for key, value in row.items() if key not in ("id", "number")}) | {"more": more}


def _format_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.isoformat() if isinstance(value, datetime) else value for key, value in row.items()}


def _make_users(access: Any) -> BoardUsers:
    return make_record(access, BoardUsers)


def _make_image(image: Any) -> ProvisionedImage | None:
    return None if image is None else make_record(image, ProvisionedImage)


_CANDIDATE_BOARDS = """
    select name, labels, state, failures, reason from hil.boards
    where not forgotten and hold = '' and state <> 'offline' order by name
"""


async def unrunnable(tx: Tx, jobs: Sequence[FarmJob]) -> dict[str, str]:
    """Return the jobs of :func:`jobs` that no board can run, with reasons (:func:`.policy.find_unrunnable`)."""
    waiting = [job for job in jobs if job.state == JobState.QUEUED.value]
    return policy.find_unrunnable(waiting, await fetch_rows(tx, _CANDIDATE_BOARDS)) if waiting else {}


async def blocked(tx: Tx, jobs: Sequence[FarmJob], settings: FarmSettings) -> dict[str, str]:
    """Return the jobs of :func:`jobs` without a board in service, with reasons (:func:`.outlook.find_blocked`)."""
    waiting = [job for job in jobs if job.state == JobState.QUEUED.value]
    return outlook.find_blocked(waiting, await read_board_rows(tx, settings)) if waiting else {}

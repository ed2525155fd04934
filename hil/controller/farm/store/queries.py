"""What can be asked of a farm, as JSON (docs/farm.schema.json says of what form). Lists go from the oldest to the
newest, and where they are cut it is the oldest that are left out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from hil.controller.farm.messages import BoardState, JobState, Principal, Priority, parse_job
from hil.controller.farm.scheduler import policy
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store import case_results, event_log, waiting_room
from hil.controller.farm.store.database import Tx
from hil.controller.farm.store.records import JOBS, NAME, fetched, storable
from hil.errors import UsageError

_MOST = 100_000
_USUAL = 200
# Users' texts in an answer: titles, selectors, reasons of jobs (characters), results and specs (bytes). Many jobs with
# long ones would take the gateway's memory. So many jobs are read at a time.
_MOST_TEXT, _MOST_RESULTS, _PAGE = 16 << 20, 64 << 20, 1000
_TEXTS = ("title", "selector", "project", "pinned", "board", "reason", "outcome")
# The board is that of the last lease; what went wrong last is the reason, until there is a result.
_QUERY = f"""
    select job.id, job.number, {NAME} as name, job.submission, submission.title, job.kind, submission.project,
        submission.priority, submission.selector, job.state, job.attempts, submission.user_name as user,
        coalesce(lease.board, '') as board, submission.board as pinned, job.queued_at, job.started_at, job.finished_at,
        result.exit_code, coalesce(result.outcome, '') as outcome,
        coalesce(result.result ->> 'reason', lease.reason, '') as reason
    from {JOBS}
    left join hil.results as result on result.job = job.id
    left join lateral (
        select board, reason from hil.leases where leases.job = job.id order by leases.id desc limit 1
    ) as lease on true
"""


async def ask(
    tx: Tx, what: str, arguments: Mapping[str, Any], settings: FarmSettings, who: Principal | None = None
) -> Any:
    """Answer a question, a field of ``AskRequest``; UsageError where there is no such job, or a value is impossible."""
    for name, value in arguments.items():
        if isinstance(value, str) and storable(value) != value:
            raise UsageError(f"there is no {name} {value!r}")
    more: dict[str, Any] = {"settings": settings} if what in ("stats", "queue") else {}
    return await _ANSWERS[what](tx, **arguments, **(more if what != "me" else {"who": who}))


async def me(tx: Tx, who: Principal | None) -> dict[str, Any]:
    """Whoever asks: the user, role and project of the token."""
    assert who is not None
    return {"user": who.user, "role": who.role.value, "project": who.project}


async def jobs(
    tx: Tx,
    state: Sequence[str] = (),
    user: str = "",
    submission: int | None = None,
    limit: int = _USUAL,
    health: bool = False,
) -> list[dict[str, Any]]:
    """The farm's jobs; its own ones, which check boards, where ``health`` is set."""
    states, known = list(state), [one.value for one in JobState]
    if unknown := [one for one in states if one not in known]:
        raise UsageError(f"a job is never {unknown[0]!r}", hint=f"it is {', '.join(known)}")
    where = ["job.kind <> 'health'"] if not health and submission is None else []
    where += ["job.state = any(%(states)s)"] if states else []
    where += ["submission.user_name = %(user)s"] if user else []
    where += ["job.submission = %(submission)s"] if submission is not None else []
    values = {"states": states, "user": user, "submission": submission}
    return [_job(row) for row in await _newest(tx, where, values, _limit(limit))]


async def _newest(tx: Tx, where: list[str], values: Mapping[str, Any], limit: int) -> list[dict[str, Any]]:
    """So many of the newest jobs, the newest last; UsageError where their texts are too long together."""
    found: list[dict[str, Any]] = []
    size, before = 0, 2**62
    conditions = " and ".join([*where, "job.id < %(before)s"])
    query = f"{_QUERY} where {conditions} order by job.id desc limit %(page)s"
    while len(found) < limit:
        page = min(_PAGE, limit - len(found))
        rows = await fetched(tx, query, {**values, "before": before, "page": page})
        found += rows
        size += sum(len(row[name]) for row in rows for name in _TEXTS)
        if size > _MOST_TEXT:
            raise UsageError(
                f"what these jobs say of themselves is longer than {_MOST_TEXT >> 20} million characters",
                hint="ask for fewer: --limit N, or one job by its name",
            )
        if len(rows) < page:
            break
        before = rows[-1]["id"]
    return found[::-1]


async def job(tx: Tx, name: str) -> dict[str, Any]:
    """One job, with all attempts at it; UsageError where there is none of this name, or it names more than one."""
    found = await _named(tx, name)
    if len(found) > 1:
        raise UsageError(f"{name} is {len(found)} jobs", hint=f"they are {found[0]['name']} to {found[-1]['name']}")
    query = (
        "select id as lease, board, fence, granted_at, started_at, ended_at, reason from hil.leases"
        " where job = %s order by id"
    )
    attempts = await fetched(tx, query, [found[0]["id"]])
    return {**_job(found[0]), "attempts_made": [_plain(row) for row in attempts]}


async def result(tx: Tx, name: str, specs: bool = False) -> list[dict[str, Any]]:
    """The results of a submission's jobs, or of one of them; a job that has none yet says its state alone.

    With ``specs`` each also has its ``spec``: what it was to do.
    """
    found = {row["id"]: row for row in await _named(tx, name)}
    joined = "hil.jobs as job left join hil.results as result on result.job = job.id where job.id = any(%s)"
    size = "coalesce(sum(octet_length(result.result::text)), 0) + coalesce(sum(octet_length(job.spec::text)), 0)"
    if len(found) > 1:
        [row] = await fetched(tx, f"select {size} as size from {joined}", [list(found)])
        if row["size"] > _MOST_RESULTS:
            has, most = int(row["size"]) >> 20, _MOST_RESULTS >> 20
            raise UsageError(
                f"the results of {name} are {has} MiB, and an answer has at most {most}",
                hint=f"ask for its jobs one by one: {name}.1, ...",
            )
    spec = ", job.spec" if specs else ""
    rows = await fetched(tx, f"select job.id, result.result{spec} from {joined} order by job.id", [list(found)])
    return [
        {"name": found[row["id"]]["name"], "state": found[row["id"]]["state"], **(row["result"] or {})}
        | ({"spec": row["spec"]} if specs else {})
        for row in rows
    ]


async def cases(tx: Tx, name: str, limit: int = _USUAL) -> dict[str, Any]:
    """What the cases of a submission's jobs, or of one of them, came to until now; those that failed first."""
    return await case_results.of_jobs(tx, [row["id"] for row in await _named(tx, name)], _limit(limit))


# A submission's name means all of its jobs.
_NAMED = """exists (
    select from unnest(%(submissions)s::bigint[], %(numbers)s::int[]) as named (submission, number)
    where named.submission = job.submission and coalesce(named.number, job.number) = job.number)"""


async def queue(tx: Tx, settings: FarmSettings, limit: int = _USUAL, jobs: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The jobs that wait, those whose turn comes first before the others, each with its place and why it waits.

    ``jobs``: only these, whatever their place.
    """
    named = [parse_job(str(name)) for name in jobs]
    found = await waiting_room.outlooks(tx, settings, _MOST if named else _limit(limit))
    where = ["job.id = any(%(ids)s)"]
    values: dict[str, Any] = {"ids": [one.job for one in found]}
    if named:
        where.append(_NAMED)
        values |= {"submissions": [one for one, _ in named], "numbers": [number for _, number in named]}
    rows = {row["id"]: row for row in await _newest(tx, where, values, _MOST)}
    # One may have been given a board since.
    told = [(rows[one.job], one) for one in found if one.job in rows]
    return [{**_job(row), "position": one.position, "why": one.why} for row, one in told]


# As people see it: one that is held back drains while it has a job.
_BOARD_STATE = "case when hold = '' then board.state when lease.id is null then 'maintenance' else 'draining' end"
_BOARDS = "hil.boards as board left join hil.leases as lease on lease.board = board.name and lease.ended_at is null"


async def boards(tx: Tx) -> list[dict[str, Any]]:
    """All boards."""
    query = f"""
        select board.name, board.site, board.host, board.hw_type, board.reason, board.labels, board.failures,
            board.warm, {_BOARD_STATE} as state, coalesce({NAME}, '') as job,
            coalesce(submission.user_name, '') as user, lease.granted_at as since, board.checked_at
        from {_BOARDS} left join ({JOBS}) on job.id = lease.job where not board.forgotten order by board.name
    """
    return [_plain(row) for row in await fetched(tx, query)]


async def events(tx: Tx, board: str = "", job: str = "", limit: int = _USUAL) -> list[dict[str, Any]]:
    """What happened to boards and jobs, and why."""
    where = [f"{name} = %({name})s" for name, value in (("board", board), ("job", job)) if value]
    query = (
        "select id, at, what, board, job, lease, reason from hil.events"
        f" where {' and '.join(where) or 'true'} order by id desc limit %(limit)s"
    )
    rows = await fetched(tx, query, {"board": board, "job": job, "limit": _limit(limit)})
    return [_plain(row) for row in reversed(rows)]


async def audit(tx: Tx, limit: int = _USUAL) -> list[dict[str, Any]]:
    """Who did what, and what was refused."""
    query = (
        'select id, at, user_name as "user", role, peer, action, object, allowed, detail'
        " from hil.audit order by id desc limit %(limit)s"
    )
    return [_plain(row) for row in reversed(await fetched(tx, query, {"limit": _limit(limit)}))]


async def tokens(tx: Tx) -> list[dict[str, Any]]:
    """All tokens: whose they are, not what."""
    query = (
        'select id, user_name as "user", project, role, note, made_at, expires_at, revoked_at,'
        " revoked_at is null and (expires_at is null or expires_at > now()) as good from hil.tokens order by id"
    )
    return [_plain(row) for row in await fetched(tx, query)]


async def printed(tx: Tx, name: str, after: int = 0) -> list[dict[str, Any]]:
    """What a submission's jobs, or one of them, printed."""
    ids = [row["id"] for row in await _named(tx, name)]
    return await event_log.output_after(tx, ids, after)


_JOB_COUNTS = "select state, count(*) as n from hil.jobs where kind <> 'health' group by state"
_BOARD_COUNTS = f"select {_BOARD_STATE} as state, count(*) as n from {_BOARDS} where not forgotten group by 1"
_QUEUE_COUNTS = f"""
    select submission.priority as state, count(*) as n from {JOBS}
    where job.state = 'queued' and job.kind <> 'health' group by 1
"""
# Of the last hour.
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


async def stats(tx: Tx, settings: FarmSettings) -> dict[str, Any]:
    """Jobs, boards and what waits, by state and class; how long jobs waited (s); who has and had what."""
    [waited] = await fetched(tx, _WAITED)
    half, most = waited["s"] or (None, None)
    users = await fetched(tx, _USERS, [settings.share_half_life_s])
    return {
        "jobs": await _counts(tx, _JOB_COUNTS, [state.value for state in JobState]),
        "boards": await _counts(tx, _BOARD_COUNTS, [state.value for state in BoardState]),
        "queue": await _counts(tx, _QUEUE_COUNTS, [priority.value for priority in Priority]),
        "waiting_s": {"p50": _seconds(half), "p95": _seconds(most)},
        "users": [{**row, "board_s": _seconds(row["board_s"])} for row in users],
    }


async def _counts(tx: Tx, query: str, known: list[str]) -> dict[str, int]:
    counts = {row["state"]: row["n"] for row in await fetched(tx, query)}
    return {state: counts.get(state, 0) for state in known}


def _seconds(value: Any) -> float | None:
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
}


async def _named(tx: Tx, name: str) -> list[dict[str, Any]]:
    """The jobs of a name, at least one."""
    submission, number = parse_job(str(name))
    values = {"submission": submission, "number": number}
    only = "" if number is None else " and job.number = %(number)s"
    # A number that no column can hold is no job's either.
    known = submission < 2**63 and (number or 0) < 2**31
    where = [f"job.submission = %(submission)s{only}"]
    found = await _newest(tx, where, values, _MOST) if known else []
    if not found:
        raise UsageError(f"the farm has no job {name}", hint="hil farm status lists them; old ones are deleted")
    return found


def _limit(limit: int) -> int:
    if not 0 < limit <= _MOST:
        raise UsageError(f"a limit is a number from 1 to {_MOST}, not {limit}")
    return limit


def _job(row: Mapping[str, Any]) -> dict[str, Any]:
    return _plain({key: value for key, value in row.items() if key not in ("id", "number")})


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.isoformat() if isinstance(value, datetime) else value for key, value in row.items()}


_CANDIDATE_BOARDS = """
    select name, labels, state, failures, reason from hil.boards
    where not forgotten and hold = '' and state <> 'offline' order by name
"""


async def unrunnable(tx: Tx, jobs: list[Mapping[str, Any]]) -> dict[str, str]:
    """Of jobs as :func:`jobs` returns them: those that no board can run, and why (:func:`.policy.unrunnable`)."""
    waiting = [job for job in jobs if job["state"] == JobState.QUEUED.value]
    return policy.unrunnable(waiting, await fetched(tx, _CANDIDATE_BOARDS)) if waiting else {}

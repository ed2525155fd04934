"""The farm in numbers, for people and for metrics."""

from __future__ import annotations

from typing import Any

from hil.controller.farm.desk.database import Tx
from hil.controller.farm.terms import Terms
from hil.controller.farm.words import BoardState, JobState, Priority

_JOBS = "select state, count(*) as n from hil.jobs where kind <> 'health' group by state"
_BOARDS = """
    select case when hold = '' then state when lease.id is null then 'maintenance' else 'draining' end as state,
        count(*) as n
    from hil.boards as board left join hil.leases as lease on lease.board = board.name and lease.ended_at is null
    where not board.forgotten group by 1
"""
_QUEUE = """
    select submission.priority as state, count(*) as n
    from hil.jobs as job join hil.submissions as submission on submission.id = job.submission
    where job.state = 'queued' and job.kind <> 'health' group by 1
"""
# Of the last hour.
_WAITING = """
    select percentile_cont(array[0.5, 0.95]) within group (order by extract(epoch from started_at - queued_at)) as s
    from hil.jobs where started_at > now() - interval '1 hour' and kind <> 'health'
"""
_USERS = """
    with open as (
        select submission.user_name, submission.project,
            count(*) filter (where job.state = 'running') as running,
            count(*) filter (where job.state = 'queued') as queued
        from hil.jobs as job join hil.submissions as submission on submission.id = job.submission
        where job.state in ('queued', 'running') and job.kind <> 'health' group by 1, 2
    )
    select user_name as "user", project, coalesce(running, 0) as running, coalesce(queued, 0) as queued,
        coalesce(hil.faded(share.board_s, share.at, %s), 0) as board_s
    from hil.shares as share full join open using (user_name, project)
    order by 1, 2
"""


async def stats(tx: Tx) -> dict[str, Any]:
    """Jobs, boards and what waits, by state and class; how long jobs waited (s); who has and had what."""
    asked = await tx.execute(_WAITING)
    waited = await asked.fetchone()
    half, most = (waited and waited["s"]) or (None, None)
    users = await tx.execute(_USERS, [Terms().share_half_life_s])
    return {
        "jobs": await _counts(tx, _JOBS, [state.value for state in JobState]),
        "boards": await _counts(tx, _BOARDS, [state.value for state in BoardState]),
        "queue": await _counts(tx, _QUEUE, [priority.value for priority in Priority]),
        "waiting_s": {"p50": _seconds(half), "p95": _seconds(most)},
        "users": [{**row, "board_s": _seconds(row["board_s"])} for row in await users.fetchall()],
    }


async def _counts(tx: Tx, query: str, known: list[str]) -> dict[str, int]:
    asked = await tx.execute(query)
    counts = {row["state"]: row["n"] for row in await asked.fetchall()}
    return {state: counts.get(state, 0) for state in known}


def _seconds(value: Any) -> float | None:
    return None if value is None else round(float(value), 3)

"""The queue's jobs: how they come into it, back into it, and to their end."""

from __future__ import annotations

from hil.controller.farm.messages import JobResult, JobState, Submission, job_name
from hil.controller.farm.store.database import Tx
from hil.controller.farm.store.event_log import note_job, note_queued
from hil.controller.farm.store.records import JobRow, as_json, fetched

# Health jobs are the farm's own: no token is anybody's of this name.
FARM = "farm"

_NEW = """
    with new as (
        insert into hil.submissions
            (user_name, project, title, selector, board, priority, timeout_s, max_attempts, trace, key, jobs)
        values (%(user)s, %(project)s, %(title)s, %(selector)s, %(board)s, %(priority)s, %(timeout_s)s,
            %(max_attempts)s, %(trace)s, %(key)s, %(jobs)s)
        returning *
    )
    insert into hil.jobs (submission, number, kind, spec, affinity, checks, state, lane)
    select new.id, given.number, given.spec ->> 'kind', given.spec, given.spec ->> 'affinity', %(checks)s, 'queued',
        hil.lane(new.user_name, new.project, new.priority, new.selector, new.board, %(checks)s, '{}')
    from new cross join jsonb_array_elements(%(specs)s::jsonb) with ordinality as given (spec, number)
    order by given.number
    returning id, submission
"""
_AGAIN = """
    update hil.jobs as job
    set state = 'queued', avoid = %(avoid)s, started_at = null, lane = hil.lane(
        submission.user_name, submission.project, submission.priority, submission.selector, submission.board,
        job.checks, %(avoid)s)
    from hil.submissions as submission
    where submission.id = job.submission and job.id = %(job)s
"""
_RESULT = """
    with first as (
        insert into hil.results (job, lease, exit_code, outcome, result)
        values (%(job)s, %(lease)s, %(exit_code)s, %(outcome)s, %(result)s)
    )
    update hil.jobs set state = %(state)s, finished_at = clock_timestamp() where id = %(job)s
"""


async def enqueue(
    tx: Tx, order: Submission, user: str, project: str, trace: str = "", *, checks: str | None = None
) -> tuple[int, list[int]]:
    """Queue an order's jobs; returns the submission's number and theirs. ``checks``: the board a health job is for."""
    values = {
        "user": user,
        "project": project,
        "title": order.title,
        "selector": order.selector,
        "board": order.board,
        "priority": order.priority.value,
        "timeout_s": order.timeout_s,
        "max_attempts": order.max_attempts,
        "trace": trace,
        "key": order.key,
        "jobs": len(order.specs),
        "specs": as_json([spec.to_json() for spec in order.specs]),
        "checks": checks,
    }
    rows = await fetched(tx, _NEW, values)
    submission, jobs = rows[0]["submission"], sorted(row["id"] for row in rows)
    await note_queued(tx, submission, jobs, order.title)
    return submission, jobs


def names_of(submission: int, jobs: int) -> list[str]:
    """What the jobs of a submission are called."""
    return [job_name(submission, number, jobs) for number in range(1, jobs + 1)]


async def queue_again(tx: Tx, job: JobRow, failed_on: str, reason: str) -> None:
    """The job waits once more, at its old place in the queue, and rather for another board."""
    avoid = sorted({*job.avoid, failed_on})
    await tx.execute(_AGAIN, {"job": job.id, "avoid": avoid})
    await note_job(tx, "again", job, JobState.QUEUED, reason=reason, board=failed_on)


async def finish(
    tx: Tx, job: JobRow, result: JobResult, lease: int | None = None, *, state: JobState = JobState.DONE
) -> None:
    """The job has its one result, and nothing more happens to it."""
    values = {
        "job": job.id,
        "lease": lease,
        "exit_code": result.exit_code,
        "outcome": result.outcome,
        "result": as_json(result.to_json()),
        "state": state.value,
    }
    await tx.execute(_RESULT, values)
    await note_job(tx, state.value, job, state, reason=result.reason)

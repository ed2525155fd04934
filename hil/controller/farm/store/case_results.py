"""What the cases of jobs came to: of jobs that run as their hosts tell it, of those that ended as their results say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hil.controller.farm.store.database import Tx
from hil.controller.farm.store.records import JOBS, NAME, as_json, fetched, storable

# Of each text so many characters, of a lease so many cases.
LONGEST, _MOST_CASES = 500, 10_000

_KEEP = """
    insert into hil.cases (lease, name, outcome, reason)
    select lease.id, given.name, given.outcome, given.reason
    from hil.leases as lease, jsonb_to_recordset(%(cases)s::jsonb) as given (name text, outcome text, reason text)
    where lease.id = %(lease)s and lease.ended_at is null
        and (select count(*) from hil.cases where cases.lease = lease.id) < %(most)s
    on conflict (lease, name) do update set outcome = excluded.outcome, reason = excluded.reason
"""
# A record is its host's, and may be anything.
_READ = f"""
    with found as (
        select job.id, {NAME} as job, running.number, running.name, running.outcome, running.reason
        from {JOBS} join hil.leases as lease on lease.job = job.id and lease.ended_at is null
        join hil.cases as running on running.lease = lease.id
        where job.id = any(%(jobs)s)
        union all
        select job.id, {NAME}, told.number, coalesce(told.of ->> 'id', told.of ->> 'name', ''),
            coalesce(told.of ->> 'outcome', ''), coalesce(told.of ->> 'message', told.of ->> 'reason', '')
        from {JOBS} join hil.results as result on result.job = job.id
        cross join lateral jsonb_array_elements(
            case jsonb_typeof(result.result #> '{{record,cases}}')
                when 'array' then result.result #> '{{record,cases}}' else '[]' end
        ) with ordinality as told (of, number)
        where job.id = any(%(jobs)s) and jsonb_typeof(told.of) = 'object'
    )
    select job, left(name, %(longest)s) as name, left(outcome, %(longest)s) as outcome,
        left(reason, %(longest)s) as reason, count(*) over () as total
    from found order by outcome in ('PASS', 'XFAIL', 'SKIP'), id, number limit %(limit)s
"""


async def keep(tx: Tx, lease: int, cases: Sequence[tuple[str, str, str]]) -> None:
    """Keep the name, outcome and reason of cases that ended, while their job runs."""
    # The last word on a case counts, and a statement can say only one.
    last = {storable(name[:LONGEST]): (outcome, reason) for name, outcome, reason in cases}
    given = [
        {"name": name, "outcome": storable(outcome[:LONGEST]), "reason": storable(reason[:LONGEST])}
        for name, (outcome, reason) in last.items()
    ]
    if given:
        await tx.execute(_KEEP, {"lease": lease, "cases": as_json(given), "most": _MOST_CASES})


async def forget(tx: Tx, lease: int) -> None:
    """Delete what is kept of a lease: it is over, and its job has a result, or begins anew."""
    await tx.execute("delete from hil.cases where lease = %s", [lease])


async def of_jobs(tx: Tx, jobs: Sequence[int], limit: int) -> dict[str, Any]:
    """What the cases of jobs came to until now: how many there are, and so many, those that failed first."""
    found = await fetched(tx, _READ, {"jobs": list(jobs), "limit": limit, "longest": LONGEST})
    total = found[0]["total"] if found else 0
    return {"total": total, "cases": [{key: row[key] for key in row if key != "total"} for row in found]}

"""Case results of jobs: reported by hosts while a job runs, read from the result afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from hil.controller.farm.database.database import Tx
from hil.controller.farm.store.records import JOBS, NAME, as_json, fetch_rows, make_storable
from hil.controller.records.lab.farm import FarmCase, FarmCases

# Maximum characters per text, and maximum cases per lease.
LONGEST, _MOST_CASES = 500, 10_000

_KEEP = """
    insert into hil.cases (lease, name, outcome, reason)
    select lease.id, given.name, given.outcome, given.reason
    from hil.leases as lease, jsonb_to_recordset(%(cases)s::jsonb) as given (name text, outcome text, reason text)
    where lease.id = %(lease)s and lease.ended_at is null
        and (select count(*) from hil.cases where cases.lease = lease.id) < %(most)s
    on conflict (lease, name) do update set outcome = excluded.outcome, reason = excluded.reason
"""
# Records come from hosts, so their form is not trusted.
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
    """Store name, outcome and reason of finished cases of a running job."""
    # Keep only the last result of each case, because one upsert statement cannot change a row twice.
    last = {make_storable(name[:LONGEST]): (outcome, reason) for name, outcome, reason in cases}
    given = [
        {"name": name, "outcome": make_storable(outcome[:LONGEST]), "reason": make_storable(reason[:LONGEST])}
        for name, (outcome, reason) in last.items()
    ]
    if given:
        await tx.execute(_KEEP, {"lease": lease, "cases": as_json(given), "most": _MOST_CASES})


async def forget(tx: Tx, lease: int) -> None:
    """Delete the stored cases of an ended lease."""
    await tx.execute("delete from hil.cases where lease = %s", [lease])


async def list_case_results(tx: Tx, jobs: Sequence[int], limit: int) -> FarmCases:
    """Return the total number of cases and up to ``limit`` cases of jobs, failures first."""
    found = await fetch_rows(tx, _READ, {"jobs": list(jobs), "limit": limit, "longest": LONGEST})
    total = found[0]["total"] if found else 0
    cases = [FarmCase(**{key: row[key] for key in row if key != "total"}) for row in found]
    return FarmCases(total=total, cases=cases)

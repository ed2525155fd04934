"""Check the state after a chaos test: the database, the journals and leaked resources. Write a report."""

from __future__ import annotations

import os
import platform
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.rows import dict_row

from support.farm_chaos_checks import (
    board_of,
    board_violations,
    lease_violations,
    read_journal,
    result_violations,
    retry_violations,
)

if TYPE_CHECKING:
    from support.farm_chaos import Farm, Size

_JOBS = """
    select case when submission.jobs = 1 then submission.id::text else submission.id || '.' || job.number end as name,
        job.state, job.attempts, job.kind, result.exit_code, result.outcome, result.lease,
        coalesce(result.result ->> 'reason', '') as reason,
        (select count(*) from hil.results as one where one.job = job.id) as results
    from hil.jobs as job
    join hil.submissions as submission on submission.id = job.submission
    left join hil.results as result on result.job = job.id
    where submission.user_name <> 'farm'
"""
_LEASES = """
    select lease.id, lease.board, lease.fence, lease.worker, lease.reason, job.kind,
        extract(epoch from lease.granted_at)::float8 as granted_at,
        extract(epoch from lease.ended_at)::float8 as ended_at,
        case when submission.jobs = 1 then submission.id::text else submission.id || '.' || job.number end as job,
        exists (select 1 from hil.results as result where result.lease = lease.id) as counted
    from hil.leases as lease
    join hil.jobs as job on job.id = lease.job
    join hil.submissions as submission on submission.id = job.submission
"""
_LEFT = {
    "leases that nobody ended": "select count(*) from hil.leases where ended_at is null",
    "jobs of the queue's engine that nobody ended": (
        "select count(*) from procrastinate_jobs where status in ('todo', 'doing')"
    ),
    "transactions that nobody ended": (
        "select count(*) from pg_stat_activity"
        " where state like 'idle in transaction%' and xact_start < now() - interval '10 s'"
    ),
}


@dataclass
class Verdict:
    """Result of a chaos test.

    Attributes:
        violations: violated conditions, as text.
        leaks: resources that were not released.
        figures: counts for the report.
    """

    seed: int
    size: Size
    violations: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    blows: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Return whether all conditions hold and no resource leaked."""
        return not self.violations and not self.leaks


def look(farm: Farm, seed: int) -> Verdict:
    """Check everything while the farm still runs. Its hosts are idle at this time."""
    found = Verdict(seed, farm.size)
    with psycopg.connect(farm.database.url, autocommit=True, row_factory=dict_row) as connection:

        def rows(query: str) -> list[dict[str, Any]]:
            return connection.execute(query).fetchall()

        found.leaks += _settled(rows)
        jobs, leases = rows(_JOBS), rows(_LEASES)
        events = Counter(row["what"] for row in rows("select what from hil.events"))
    boards = {name: board_of(name, read_journal(store)) for name, store in farm.agents.items()}
    found.violations += result_violations(jobs, farm.expected)
    # If another failure made a result final, the job has no lease for its result.
    found.violations += retry_violations(leases, {job["name"] for job in jobs if job["lease"] is not None})
    found.violations += lease_violations(leases, boards)
    for board in boards.values():
        found.violations += board_violations(board)
    real = [lease for lease in leases if lease["kind"] != "health"]
    attempts = Counter(lease["job"] for lease in real)
    workers: dict[str, set[str]] = {}
    for lease in leases:
        workers.setdefault(lease["board"], set()).add(lease["worker"])
    found.figures = {
        "jobs": len(jobs),
        "results by outcome": dict(Counter(job["outcome"] for job in jobs).most_common()),
        "leases": len(real),
        "jobs with more than one lease": sum(count > 1 for count in attempts.values()),
        "most leases of a job": max(attempts.values(), default=0),
        "health checks": len(leases) - len(real),
        "workers with a lease": sum(len(names) for names in workers.values()),
        "sessions in the agents' journals": sum(len(board.sessions) for board in boards.values()),
        "loads and runs in the journals": sum(len(board.runs) for board in boards.values()),
        "why leases ended": dict(
            Counter(_plain(lease["reason"]) for lease in real if not lease["counted"]).most_common(15)
        ),
        "events": dict(events.most_common()),
    }
    return found


def _settled(rows: Any, seconds: float = 20.0) -> list[str]:
    """Return the leases and similar resources that remain when the farm is idle."""
    deadline = time.monotonic() + seconds
    while True:
        left = {what: rows(query)[0]["count"] for what, query in _LEFT.items()}
        if not any(left.values()) or time.monotonic() > deadline:
            return [f"{count} {what}" for what, count in left.items() if count]
        time.sleep(0.25)


def ended(farm: Farm) -> list[str]:
    """Stop the farm in order. Return the processes, sockets and files that remain."""
    leaks = []
    for kind in ("host", "gateway", "agent"):
        for name in [name for name in farm.keeper.kept if name.startswith(kind)]:
            if not farm.keeper.stop(name):
                leaks.append(f"{name} did not end when it was told to")
        if kind == "host":
            allowed = {kept.pid for kept in farm.keeper.kept.values()}
            leaks += [f"process left of the hosts: {line[:100]}" for line in _strangers(farm, allowed)]
    # Otherwise, it would start the database again.
    farm.keeper.stop_looking()
    farm.database.stop()
    leaks += [f"process left: {line[:100]}" for line in farm.keeper.get_marked().values()]
    sockets = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if str(farm.folder) in line]
    leaks += [f"socket left: {path}" for path in sockets]
    for path in (farm.folder / "tmp").rglob("*"):
        if not path.is_dir() and path.name != ".ses":  # from onnxruntime
            leaks.append(f"temporary file left: {path.relative_to(farm.folder)}")
    return leaks


def _strangers(farm: Farm, allowed: set[int]) -> list[str]:
    """Return processes of hosts and their workers that remain. Processes of this test, of agents and of the database do
    not count.
    """
    marks = {str(farm.folder / "postgres"), "postgres:", "hil.sim", "hil.agent", "farm gateway"}
    return [
        line
        for pid, line in farm.keeper.get_marked().items()
        if pid not in allowed and not any(mark in line for mark in marks)
    ]


def report(found: Verdict) -> str:
    """Return the report as Markdown."""
    size, figures = found.size, dict(found.figures)
    why, events = figures.pop("why leases ended"), figures.pop("events")
    lines = [
        "# Farm chaos test",
        "",
        "This test kills, freezes and disconnects the processes of a [farm](farm.md) at random while jobs run. "
        "Then it checks that no job is lost, wrong or recorded twice. To run the test and write this page again:",
        "",
        "    scripts/farm-chaos [--seed N] [--quick] [-o FILE]",
        "",
        "The exit code is 1 if a check fails. `scripts/test --all` also runs the test.",
        "",
        "## Set-up",
        "",
        f"- {size.jobs} jobs on {size.boards} simulated boards; {size.hosts} hosts, two gateways, a database",
        "- a third of the boards are served by two hosts",
        f"- {found.seconds['chaos']:.0f} s of faults, with a fault every {size.every_s:g} s; then the test waited "
        f"{found.seconds['after it']:.0f} s for the remaining jobs",
        f"- seed {found.seed}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "",
        "## Result",
        "",
        f"**{'All checks passed.' if found.good else 'Some checks failed.'}**",
        "",
        "| Check | Violations |",
        "|---|---|",
        "| Every job has exactly one final result, with the correct outcome for the job. "
        f"| {_count(found.violations, 'job ')} |",
        "| No board has overlapping sessions, leases or runs, and all runs use the "
        "[fence](protocol.md#session-and-fence) of the lease (from the agents' journals). "
        f"| {len(found.violations) - _count(found.violations, 'job ')} |",
        "| No leases, queue entries, transactions, processes, sockets or temporary files remain. "
        f"| {len(found.leaks)} |",
        "",
        *(f"- {text}" for text in [*found.violations, *found.leaks]),
        "",
        "| Fault | Times |",
        "|---|---|",
        *(f"| {what} | {count} |" for what, count in sorted(found.blows.items())),
        "",
        "`cut link`: the connection between a host and a gateway stays open, but does not transfer data for 1 to 5 s. "
        "`drop link`: all connections between a host and a gateway are closed.",
        "",
        "| Observation | |",
        "|---|---|",
        *(f"| {what} | {_shown(value)} |" for what, value in figures.items()),
        "",
        "| Reason for a lease without a result | Leases |",
        "|---|---|",
        *(f"| {reason.replace('|', '/')} | {count} |" for reason, count in why.items()),
        "",
        "A health check is also a job, so the events count both: `job.done` includes the health checks.",
        "",
        "| Event | Times |",
        "|---|---|",
        *(f"| {what} | {count} |" for what, count in events.items()),
        "",
    ]
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def _plain(reason: str) -> str:
    """Remove names of boards and numbers from a reason."""
    return re.sub(r"board-\d+|\b\d+(\.\d+)?\b|(?<=unix:)\S+", "...", reason.splitlines()[0] if reason else "reported")


def _count(texts: list[str], start: str) -> int:
    return sum(text.startswith(start) for text in texts)


def _shown(value: Any) -> str:
    return ", ".join(f"{name} {count}" for name, count in value.items()) if isinstance(value, dict) else str(value)

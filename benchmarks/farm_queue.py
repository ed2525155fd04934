"""Measure scheduling decisions with a long queue: 500 boards of five kinds, up to 10,000 queued jobs of eight users.

The benchmark calls the store's functions like a gateway, each in a separate transaction on an embedded PostgreSQL.
Boards are only rows, and no job runs. A decision is the report of a worker: the store records the end of the job, and
gives the board to the next job. The benchmark also measures the submission of a job.

Run it as `python -m benchmarks.farm_queue`; `--boards`, `--jobs`, `--decisions N` at each length of the queue.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import Row, timed
from benchmarks.web_pages import P95, percentile
from hil.controller.farm.database.database import migrate
from hil.controller.farm.database.embedded_database import EmbeddedDatabase
from hil.controller.farm.messages import JobSpec, Kind, Principal, Priority, Role

P50, P99 = 0.5, 0.99
KINDS, USERS, MODELS = 5, 8, 200
# First length of the queue. Growth is relative to this length.
SHORT = 1000
_ORDER = 100


def main() -> None:
    """Measure and print."""
    given = common.options(__doc__, boards=500, jobs=10_000, decisions=400)
    sys.path.append(str(common.HERE.parent / "tests"))
    from support.farm_desks import open_desk

    with tempfile.TemporaryDirectory(prefix="hil-bench-") as folder:
        database = EmbeddedDatabase(Path(folder) / "postgres")
        url = database.start()
        try:
            asyncio.run(migrate(url))
            with open_desk(url, lease_s=86_400, owner_s=86_400) as desk:
                rows = measured(desk, given.boards, given.jobs, given.decisions)
        finally:
            database.stop()
    common.show(
        "farm_queue", rows, [f"{given.boards} boards, all busy, as those of a long queue are"], as_json=given.json
    )


def measured(desk: Any, boards: int, most: int, decisions: int) -> list[Row]:
    """Return the rows, from the shortest queue to the longest."""
    names = [f"board-{number}" for number in range(boards)]
    for number, name in enumerate(names):
        desk.attend(name, labels={"kind": f"k{number % KINDS}"})
    leases = desk.rows("select id, worker from hil.leases where ended_at is null")
    for lease in leases:  # end the checks of new boards
        desk.report(lease["id"], worker=lease["worker"])
    orders = orders_of()
    queue(desk, orders, boards)
    rows, decided = [], {}
    lengths = sorted({min(SHORT, most), min(3 * SHORT, most), most})
    for length in lengths:
        queue(desk, orders, length - waiting(desk))
        desk.rows("analyze")
        taken: list[float] = []
        for lease in ended_first(desk, decisions):
            taken += timed(partial(desk.report, lease["id"], worker=lease["worker"]), 1)
        ordered = timed(lambda: queue(desk, orders, 1), decisions // 4)
        decided[length] = {share: percentile(taken, share) for share in (P50, P99)}
        bar = "<= 20" if length == most else ""
        rows.append(Row(f"a decision, {length} jobs wait, p50", decided[length][P50] * 1e3, "ms"))
        rows.append(Row(f"a decision, {length} jobs wait, p99", decided[length][P99] * 1e3, "ms", bar=bar))
        rows.append(Row(f"an order of one job, {length} wait, p95", percentile(ordered, P95) * 1e3, "ms"))
    if len(lengths) > 1:
        short, long = lengths[0], lengths[-1]
        mine, theirs = decided[long][P50] * 1e3, decided[short][P50] * 1e3
        limit = long * math.log(long) / (short * math.log(short))
        case = f"a decision's p50, {long} jobs beside {short} (n log n: {limit:.1f})"
        rows.append(Row(case, mine, "ms", f"{short} jobs", theirs, mine / theirs, f"<= {limit:.1f}"))
    return rows


def orders_of() -> Iterable[dict[str, Any]]:
    """Yield the properties of submissions, with alternating users, projects, priorities, kinds of boards and models."""
    classes = list(Priority)
    for number in itertools.count():
        who = Principal(f"user{number % USERS}", Role.ADMIN, f"project{number % 3}")
        yield {
            "who": who,
            "project": who.project,
            "priority": classes[number % len(classes)],
            "selector": f"kind=k{number % KINDS}" if number % 4 else "",
            "affinities": [f"model{(7 * number + one) % MODELS}" for one in range(_ORDER)],
        }


def queue(desk: Any, orders: Iterable[dict[str, Any]], count: int) -> None:
    """Submit ``count`` jobs, a hundred at a time."""
    while count > 0:
        order = next(iter(orders))
        affinities = order.pop("affinities")[:count]
        specs = tuple(JobSpec(Kind.RUN, affinity=one) for one in affinities)
        desk.submit(specs=specs, key=str(desk.number()), **order)
        count -= len(specs)


def waiting(desk: Any) -> int:
    """Return the number of queued jobs."""
    return int(desk.rows("select count(*) as n from hil.jobs where state = 'queued'")[0]["n"])


def ended_first(desk: Any, count: int) -> Iterable[dict[str, Any]]:
    """Yield active leases, the oldest first. The database is read for each lease."""
    for _ in range(count):
        yield desk.rows("select id, worker from hil.leases where ended_at is null order by id limit 1")[0]


if __name__ == "__main__":
    main()

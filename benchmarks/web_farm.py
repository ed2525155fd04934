"""Measure the farm pages of `hil web`: 20 boards, 20,000 events, 5,000 ended jobs and 2,000 queued jobs.

A separate farm (gateway and embedded database) has these as rows; no job runs. The time is for a whole response over
one connection: the first response of each page, and the 95th percentile of the other responses. Each request is sent
after the cached charts of `hil web` have expired.

Run it as `python -m benchmarks.web_farm`; `--rounds N` (default: 20), `--events N`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import Row
from benchmarks.farm_lab import embedded_url
from benchmarks.web_pages import P95, percentile
from benchmarks.web_server import hil_web
from hil.controller.farm.local.local_farm import LocalFarm, UpOptions
from hil.controller.farm.paths import HOME_VARIABLE

BOARDS, JOBS, WAITING = 20, 5000, 2000
PAGES = {
    "boards, with the chart of their use": "/boards?hours=168",
    "a board, with the chart of its use": "/board?name=b01&hours=168",
    "queue, with the chart of how long jobs waited": "/queue?hours=168",
    "queue, 200 on a page": "/queue?hours=168&limit=2000",
    "queue, its last page": "/queue?hours=168&page=20",
}
# Time after which charts are computed again: see `hil.controller.web.farm.link`.
_PAUSE_S = 15.5


def main() -> None:
    """Measure and print."""
    given = common.options(__doc__, rounds=20, events=20_000)
    sys.path.append(str(common.HERE.parent / "tests"))
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="hil-bench-") as scratch, contextlib.ExitStack() as stack:
        home, runs = Path(scratch) / "home", Path(scratch) / "runs"
        runs.mkdir()
        os.environ[HOME_VARIABLE] = str(home)
        stack.enter_context(LocalFarm(home, UpOptions(), lambda text: None, threading.Event()))
        fill(embedded_url(home), given.events)
        server = stack.enter_context(hil_web(runs, Path(scratch) / "cache", "--farm", "local"))
        while server.get("/boards")[1] != 200:  # wait until `hil web` has called the farm
            time.sleep(0.1)
        seconds: dict[str, list[float]] = {name: [] for name in PAGES}
        for number in range(1 + given.rounds):
            for name, path in PAGES.items():
                took, status, body = server.get(path)
                assert status == 200, body[-2000:]
                seconds[name].append(took)
            if number < given.rounds:
                time.sleep(_PAUSE_S)
        rows = [Row(f"{name}, the first time", times[0] * 1e3, "ms") for name, times in seconds.items()]
        rows += [
            Row(f"{name}, p95", percentile(times[1:], P95) * 1e3, "ms", bar="<= 100")
            for name, times in seconds.items()
            if times[1:]
        ]
        rows.append(Row("peak memory, all its processes", server.peak_bytes() / 1e6, "MB", bar="<= 500"))
    common.show("web_farm", rows, notes, as_json=given.json)


def fill(url: str, events: int) -> None:
    """Write the rows. Jobs start in sequence; each waits five seconds and takes four seconds."""
    from support.farm_rows import board, job, lease, rows, submission, with_tx

    async def columns(tx: Any, table: str, *but: str) -> str:
        query = "select column_name from information_schema.columns where table_schema = 'hil' and table_name = %s"
        return ", ".join(row["column_name"] for row in await rows(tx, query, table) if row["column_name"] not in but)

    async def work(tx: Any) -> None:
        for number in range(BOARDS):
            await board(tx, f"b{number:02}", labels='{"chip": "a72"}')
        all_jobs = await submission(tx, JOBS + WAITING, selector="chip=a72")
        first = await job(tx, all_jobs, 1, state="done", attempts=1)
        same = await columns(tx, "jobs", "id", "number", "state", "queued_at", "started_at", "finished_at")
        begun = "now() - (%s - n) * interval '100 s'"
        times = f"{begun}, {begun} + interval '5 s', {begun} + interval '9 s'"
        await tx.execute(
            f"insert into hil.jobs (number, state, queued_at, started_at, finished_at, {same})"
            f" select n, 'done', {times}, {same} from hil.jobs, generate_series(2, %s) as n where id = %s",
            (JOBS, JOBS, JOBS, JOBS, first),
        )
        await tx.execute(
            f"insert into hil.jobs (number, state, queued_at, {same}) select n, 'queued', now(), {same}"
            " from hil.jobs, generate_series(%s::int, %s) as n where id = %s",
            (JOBS + 1, JOBS + WAITING, first),
        )
        one = await lease(tx, first, "b00", over=True)
        same = await columns(tx, "leases", "id", "job", "board", "fence", "granted_at", "ended_at")
        named = ", ".join(f"lease.{name}" for name in same.split(", "))
        await tx.execute(
            f"insert into hil.leases (job, board, fence, granted_at, ended_at, {same}) select job.id,"
            " 'b' || lpad((job.id %% 20)::text, 2, '0'), job.id + 1, job.started_at, job.finished_at,"
            f" {named} from hil.leases as lease, hil.jobs as job"
            " where lease.id = %s and job.state = 'done' and job.id <> %s order by job.id",
            (one, first),
        )
        await tx.execute(
            "insert into hil.events (at, what, board, job, lease, reason) select case what when 'job.queued' then"
            " granted_at - interval '5 s' when 'lease.ended' then ended_at else granted_at end, what, board,"
            " '1.' || number, leases.id, '' from hil.leases join hil.jobs on jobs.id = leases.job, unnest(%s::text[])"
            " with ordinality as told (what, place) order by leases.id desc, place desc limit %s",
            (["job.queued", "job.granted", "lease.started", "lease.ended"], events),
        )
        await tx.execute("analyze")

    with_tx(url, work)


if __name__ == "__main__":
    main()

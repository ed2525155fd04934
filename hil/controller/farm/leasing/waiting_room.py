"""Queue positions and waiting times of jobs: see :mod:`hil.controller.farm.scheduler.outlook`."""

from __future__ import annotations

from hil.controller.farm.database.database import Tx
from hil.controller.farm.leasing.allocator import compute_shares, list_queued_lanes, list_waiting_jobs
from hil.controller.farm.messages import Kind, Priority
from hil.controller.farm.scheduler import outlook
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store.records import JOBS, fetch_rows, read_board_rows


async def list_outlooks(tx: Tx, settings: FarmSettings, most: int) -> list[outlook.Outlook]:
    """Return at most ``most`` waiting jobs in scheduling order, without health jobs."""
    lanes = [lane for lane in await list_queued_lanes(tx) if lane.kind is not Kind.HEALTH]
    if not lanes:
        return []
    boards = await read_board_rows(tx, settings)
    # Read at most this many jobs per lane: a lane's later jobs cannot be among the first in the whole queue.
    waiting = await list_waiting_jobs(tx, [lane.without_avoid(boards) for lane in lanes], [most] * len(lanes))
    shares = await compute_shares(tx, settings)
    return outlook.list_outlooks(waiting, boards, shares, settings.aging_s, most, settings.limits)


_OLDEST = f"""
    select submission.priority, extract(epoch from clock_timestamp() - min(job.queued_at))::float as waits_s from {JOBS}
    where job.state = 'queued' and job.kind <> 'health' group by 1
"""


async def read_oldest_waits(tx: Tx) -> dict[str, float]:
    """Return the waiting time in seconds of the oldest queued job for every priority; 0 without jobs."""
    waits = {row["priority"]: row["waits_s"] for row in await fetch_rows(tx, _OLDEST)}
    return {priority.value: max(waits.get(priority.value, 0.0), 0.0) for priority in Priority}

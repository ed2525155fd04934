"""Queue positions of waiting jobs: see :mod:`hil.controller.farm.scheduler.outlook`."""

from __future__ import annotations

from hil.controller.farm.database.database import Tx
from hil.controller.farm.leasing.allocator import queued_lanes, shares, waiting_jobs
from hil.controller.farm.messages import Kind
from hil.controller.farm.scheduler import outlook
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store.records import board_rows


async def outlooks(tx: Tx, settings: FarmSettings, most: int) -> list[outlook.Outlook]:
    """Return at most ``most`` waiting jobs in scheduling order, without health jobs."""
    lanes = [lane for lane in await queued_lanes(tx) if lane.kind is not Kind.HEALTH]
    if not lanes:
        return []
    boards = await board_rows(tx, settings)
    # Read at most this many jobs per lane: a lane's later jobs cannot be among the first in the whole queue.
    waiting = await waiting_jobs(tx, [lane.allowed(boards) for lane in lanes], [most] * len(lanes))
    return outlook.outlooks(waiting, boards, await shares(tx, settings), settings.aging_s, most)

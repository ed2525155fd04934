"""Add queue positions to waiting jobs, and format them for commands and pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hil.controller.farm.messages import JobState

Row = Mapping[str, Any]
# Number of jobs in one queue request; the response size is limited.
_AT_ONCE = 5_000


def with_turns(ask: Callable[..., Any], jobs: Sequence[Row]) -> list[Row]:
    """Return the jobs; waiting jobs also get ``position`` and ``why`` from the queue.

    Args:
        ask: query function such as :meth:`.FarmClient.ask`.
    """
    waiting = [job["name"] for job in jobs if job["state"] == JobState.QUEUED.value]
    turns = {
        one["name"]: one
        for start in range(0, len(waiting), _AT_ONCE)
        for one in ask("queue", jobs=waiting[start : start + _AT_ONCE])
    }
    told = (
        {key: turns[job["name"]][key] for key in ("position", "why")} if job["name"] in turns else {} for job in jobs
    )
    return [{**job, **turn} for job, turn in zip(jobs, told, strict=True)]


def turn_text(job: Row) -> str:
    """Return ``place 2: rpi5 is busy; 1 job comes before it``, or "" if the job has no queue data."""
    if "why" not in job:
        return ""
    return f"place {job['position']}: {job['why']}" if job["position"] else f"no place: {job['why']}"

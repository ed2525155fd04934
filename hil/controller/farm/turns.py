"""When it is a waiting job's turn and why it waits, as commands and pages tell it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hil.controller.farm.messages import JobState

Row = Mapping[str, Any]


def with_turns(ask: Callable[..., Any], jobs: Sequence[Row]) -> list[Row]:
    """Jobs as a farm tells them; those that wait also with their ``position`` and ``why``, as its queue has them.

    Args:
        ask: asks the farm, as :meth:`.FarmClient.ask` does.
    """
    waiting = [job["name"] for job in jobs if job["state"] == JobState.QUEUED.value]
    turns = {one["name"]: one for one in ask("queue", jobs=waiting)} if waiting else {}
    told = (
        {key: turns[job["name"]][key] for key in ("position", "why")} if job["name"] in turns else {} for job in jobs
    )
    return [{**job, **turn} for job, turn in zip(jobs, told, strict=True)]


def turn_text(job: Row) -> str:
    """``place 2: rpi5 is busy; 1 job comes before it``; "" where the farm did not tell, or it waits no more."""
    if "why" not in job:
        return ""
    return f"place {job['position']}: {job['why']}" if job["position"] else f"no place: {job['why']}"

"""Add queue positions to waiting jobs, and format them for commands and pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec import UNSET

from hil.controller.farm.messages import JobState
from hil.controller.records.lab.farm import FarmJob, QueuedJob

J = TypeVar("J", bound=FarmJob)
# Maximum jobs in one queue request, because the response size is limited.
_AT_ONCE = 5_000


def add_turns(ask: Callable[..., Any], jobs: Sequence[J]) -> list[J]:
    """Return the jobs; waiting jobs also get ``position`` and ``why`` from the queue.

    Args:
        ask: query function such as :meth:`.FarmClient.ask`.
    """
    waiting = [job.name for job in jobs if job.state == JobState.QUEUED.value]
    turns: dict[str, QueuedJob] = {
        one.name: one
        for start in range(0, len(waiting), _AT_ONCE)
        for one in ask("queue", jobs=waiting[start : start + _AT_ONCE])
    }
    return [job.replace(position=turn.position, why=turn.why) if (turn := turns.get(job.name)) else job for job in jobs]


def turn_text(job: FarmJob) -> str:
    """Return ``place 2: rpi5 is busy; 1 job comes before it``, or "" if the job has no queue data."""
    if job.why is UNSET:
        return ""
    return f"place {job.position}: {job.why}" if job.position else f"no place in the queue: {job.why}"

"""Compute board use and queue times from a farm's events and jobs. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from hil.controller.records.lab.farm import FarmEvent, FarmJob


def parse_moment(text: str | None) -> float | None:
    """Convert a timestamp of the farm to seconds since the epoch, or None to None."""
    return datetime.fromisoformat(text).timestamp() if text else None


@dataclass(frozen=True)
class Stay:
    """Period during which a job uses a board."""

    lease: int
    job: str
    board: str
    # Seconds since the epoch. ``begun`` is None if it precedes the known events; ``ended`` is None while the lease
    # lasts.
    begun: float | None = None
    ended: float | None = None
    reason: str = ""  # reason for its end


def find_lease_periods(events: Iterable[FarmEvent]) -> list[Stay]:
    """Return the leases in the events, in order of their start."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        number, what = event.lease, event.what
        if number is None or what not in ("job.granted", "lease.started", "lease.ended"):
            continue
        stay = found.setdefault(number, {"lease": number, "job": event.job, "board": event.board})
        if what == "job.granted":
            stay["begun"] = parse_moment(event.at)
        elif what == "lease.ended":
            stay |= {"ended": parse_moment(event.at), "reason": event.reason}
    return [Stay(**stay) for stay in found.values()]


def compute_board_use(
    had: Iterable[Stay], boards: Sequence[str], since: float, until: float, parts: int
) -> dict[str, list[float]]:
    """Return every board's utilization (0 to 1) in each of ``parts`` equal intervals."""
    width = (until - since) / parts
    used = {name: [0.0] * parts for name in boards}
    for stay in had:
        begun = max(since, stay.begun if stay.begun is not None else since)
        ended = min(until, stay.ended if stay.ended is not None else until)
        if stay.board not in used or ended <= begun:
            continue
        first, last = int((begun - since) / width), min(parts - 1, int((ended - since) / width))
        for part in range(first, last + 1):
            edge = since + part * width
            used[stay.board][part] += max(0.0, min(ended, edge + width) - max(begun, edge)) / width
    return {name: [min(1.0, share) for share in shares] for name, shares in used.items()}


@dataclass(frozen=True)
class QueueTimes:
    """Queue times of jobs that started in one interval."""

    since: float
    jobs: int = 0
    # Median and 95th percentile of the queue time (s); None without jobs.
    half: float | None = None
    most: float | None = None


def queue_times(jobs: Iterable[FarmJob], since: float, until: float, parts: int) -> list[QueueTimes]:
    """Return the queue times of jobs that started in each of ``parts`` equal intervals."""
    width = (until - since) / parts
    waited: list[list[float]] = [[] for _ in range(parts)]
    for job in jobs:
        queued, begun = parse_moment(job.queued_at), parse_moment(job.started_at)
        if queued is not None and begun is not None and since <= begun <= until:
            waited[min(parts - 1, int((begun - since) / width))].append(max(0.0, begun - queued))
    return [
        QueueTimes(since + part * width, len(one), _compute_quantile(one, 0.5), _compute_quantile(one, 0.95))
        for part, one in enumerate(waited)
    ]


def _compute_quantile(values: Sequence[float], share: float) -> float | None:
    """Return the quantile ``share`` (nearest rank), or None without values."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None

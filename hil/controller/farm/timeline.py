"""How a farm did over time, from what it tells of its events and jobs: pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

Row = Mapping[str, Any]


def moment(text: str | None) -> float | None:
    """A time as a farm tells it, in seconds since the epoch; None for none."""
    return datetime.fromisoformat(text).timestamp() if text else None


@dataclass(frozen=True)
class Stay:
    """A job's time on a board."""

    lease: int
    job: str
    board: str
    # begun, ended: seconds since the epoch. None: before the first event that is known; not yet.
    begun: float | None = None
    ended: float | None = None
    reason: str = ""  # why it ended


def stays(events: Iterable[Row]) -> list[Stay]:
    """Who had which board when, in the order of beginning."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        number, what = event["lease"], event["what"]
        if number is None or what not in ("job.granted", "lease.started", "lease.ended"):
            continue
        stay = found.setdefault(number, {"lease": number, "job": event["job"], "board": event["board"]})
        if what == "job.granted":
            stay["begun"] = moment(event["at"])
        elif what == "lease.ended":
            stay |= {"ended": moment(event["at"]), "reason": event["reason"]}
    return [Stay(**stay) for stay in found.values()]


def board_use(
    had: Iterable[Stay], boards: Sequence[str], since: float, until: float, parts: int
) -> dict[str, list[float]]:
    """Of each board, the share (0 to 1) of each of so many equal parts of a time in which a job had it."""
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
class Waits:
    """How long the jobs waited that got a board within one part of a time."""

    since: float
    jobs: int = 0
    # half, most: half of them, and 95 of 100, waited at most so long (s); None where there were none.
    half: float | None = None
    most: float | None = None


def queue_times(jobs: Iterable[Row], since: float, until: float, parts: int) -> list[Waits]:
    """Of each of so many equal parts of a time: how long the jobs waited that began in it."""
    width = (until - since) / parts
    waited: list[list[float]] = [[] for _ in range(parts)]
    for job in jobs:
        queued, begun = moment(job["queued_at"]), moment(job["started_at"])
        if queued is not None and begun is not None and since <= begun <= until:
            waited[min(parts - 1, int((begun - since) / width))].append(max(0.0, begun - queued))
    return [
        Waits(since + part * width, len(one), _within(one, 0.5), _within(one, 0.95)) for part, one in enumerate(waited)
    ]


def _within(values: Sequence[float], share: float) -> float | None:
    """The least value that so great a share of them does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None

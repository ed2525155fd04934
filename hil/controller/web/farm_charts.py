"""The times and boards of a farm's charts, each with the numbers that its table shows."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hil.controller.farm.timeline import Row, Stay, Waits, board_use, queue_times
from hil.errors import UsageError

# How far back: hours -> what it is called. Each is cut into so many parts.
SPANS = {1: "hour", 24: "day", 168: "week", 720: "30 days"}
PARTS = 24


@dataclass(frozen=True)
class Chart:
    """A chart over time, drawn by the page from ``data``."""

    hours: int
    times: Sequence[float]  # where each part begins, in seconds since the epoch
    lines: dict[str, Sequence[float | None]]
    known_since: float | None = None  # where what was read does not go as far back

    @property
    def data(self) -> str:
        """What its script draws."""
        return json.dumps({"times": list(self.times), "lines": {name: list(one) for name, one in self.lines.items()}})

    def of(self, names: Sequence[str]) -> Chart:
        """The same with some of its lines alone."""
        return replace(self, lines={name: self.lines[name] for name in names if name in self.lines})


def no_chart(hours: int) -> Chart:
    """One with nothing in it."""
    return Chart(hours, (), {})


def span_of(hours: int) -> int:
    """How many hours a chart goes back. Raises UsageError: there is no such chart."""
    if hours not in SPANS:
        raise UsageError(f"there is no chart of {hours} hours", hint=f"one of {', '.join(map(str, SPANS))}")
    return hours


def stays_chart(had: Sequence[Stay], cut: bool, boards: Sequence[str], hours: int, now: float | None = None) -> Chart:
    """Each board's use: the percentage of each part's time in which a job had it, from who had which.

    Args:
        cut: whether it may be that what was before is not known.
    """
    until = time.time() if now is None else now
    since = until - hours * 3600
    used = board_use(had, boards, since, until, PARTS)
    known = min((one.begun for one in had if one.begun), default=None) if cut else None
    lines: dict[str, Any] = {name: [round(100 * share, 1) for share in shares] for name, shares in used.items()}
    return Chart(hours, _times(since, hours), lines, known)


def wait_chart(jobs: Sequence[Row], hours: int, now: float | None = None) -> tuple[Chart, list[Waits]]:
    """How long jobs waited, in seconds: half of those that began in each part, and 95 of 100."""
    until = time.time() if now is None else now
    since = until - hours * 3600
    waits = queue_times(jobs, since, until, PARTS)
    lines: dict[str, Sequence[float | None]] = {
        "half within": [one.half for one in waits],
        "95 of 100 within": [one.most for one in waits],
    }
    return Chart(hours, _times(since, hours), lines), waits


def _times(since: float, hours: int) -> list[float]:
    return [since + part * hours * 3600 / PARTS for part in range(PARTS)]

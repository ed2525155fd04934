"""Data for the farm's charts: board use and queue times."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hil.controller.farm.timeline import QueueTimes, Stay, compute_board_use, queue_times
from hil.controller.records.lab.farm import FarmJob
from hil.controller.web.text.parameters import InvalidParameter

# Time spans in hours and their labels. A span has PARTS intervals.
SPANS = {1: "hour", 24: "day", 168: "week", 720: "30 days"}
PARTS = 24


@dataclass(frozen=True)
class Chart:
    """Chart over time. The page's script draws ``data``."""

    hours: int
    times: Sequence[float]  # interval starts, in seconds since the epoch
    lines: dict[str, Sequence[float | None]]
    known_since: float | None = None  # set if the records do not cover the whole span

    @property
    def data(self) -> str:
        """The chart's data as JSON."""
        lines = {name: list(one) for name, one in self.lines.items()}
        until = self.times[0] + self.hours * 3600 if self.times else None
        return json.dumps({"times": list(self.times), "until": until, "lines": lines})

    def select_lines(self, names: Sequence[str]) -> Chart:
        """Return a copy of the chart with only the named lines."""
        return replace(self, lines={name: self.lines[name] for name in names if name in self.lines})


def make_empty_chart(hours: int) -> Chart:
    """Return an empty chart."""
    return Chart(hours, (), {})


def check_span(hours: int) -> int:
    """Validate a chart's time span in hours. Raises UsageError if the time span is not in :data:`SPANS`."""
    if hours not in SPANS:
        raise InvalidParameter.choose("chart length in hours", str(hours), map(str, SPANS))
    return hours


def make_use_chart(
    had: Sequence[Stay], cut: bool, boards: Sequence[str], hours: int, now: float | None = None
) -> Chart:
    """Return a chart with board use: the time with a job, in percent per interval.

    Args:
        had: periods in which jobs used boards.
        cut: whether earlier records may be missing.
    """
    until = time.time() if now is None else now
    since = until - hours * 3600
    used = compute_board_use(had, boards, since, until, PARTS)
    known = min((one.begun for one in had if one.begun), default=None) if cut else None
    lines: dict[str, Any] = {name: [round(100 * share, 1) for share in shares] for name, shares in used.items()}
    return Chart(hours, _split_span(since, hours), lines, known)


def wait_chart(jobs: Sequence[FarmJob], hours: int, now: float | None = None) -> tuple[Chart, list[QueueTimes]]:
    """Return a chart with queue times in seconds: median and 95th percentile per interval."""
    until = time.time() if now is None else now
    since = until - hours * 3600
    waits = queue_times(jobs, since, until, PARTS)
    lines: dict[str, Sequence[float | None]] = {
        "median": [one.half for one in waits],
        "95th percentile": [one.most for one in waits],
    }
    return Chart(hours, _split_span(since, hours), lines), waits


def _split_span(since: float, hours: int) -> list[float]:
    return [since + part * hours * 3600 / PARTS for part in range(PARTS)]

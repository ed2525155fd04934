"""Documents of the pages of a farm."""

from __future__ import annotations

from typing import Annotated

from hil.controller.records.base import Number, Record, note
from hil.controller.records.lab.farm import FarmBoard, FarmCase, FarmEvent, FarmJob, FarmStats, QueuedJob
from hil.controller.records.pages.common import PageDocument, Seconds, SessionSummary


class ChartLines(Record, kw_only=True):
    """Values over time."""

    hours: Annotated[int, note("length in hours")]
    times: Annotated[list[float], note("start of each interval, in seconds since the epoch")]
    lines: Annotated[dict[str, list[Number]], note("a value per interval")]


class BoardsDocument(PageDocument, kw_only=True):
    """Boards of a farm."""

    boards: list[FarmBoard]
    use: Annotated[ChartLines, note("time with a job in percent, per board")]


class LeasePeriod(Record, kw_only=True):
    """Period in which a job used a board."""

    lease: int
    job: str
    board: str
    begun: Seconds
    ended: Seconds
    reason: str


class BoardDocument(PageDocument, kw_only=True):
    """Board of a farm."""

    board: FarmBoard
    events: Annotated[list[FarmEvent], note("newest first")]
    leases: Annotated[list[LeasePeriod], note("newest first")]
    use: ChartLines


class QueueDocument(PageDocument, kw_only=True):
    """Queue of a farm."""

    stats: FarmStats
    waiting: Annotated[list[QueuedJob], note("in order")]
    running: list[FarmJob]
    ended: Annotated[list[FarmJob], note("newest first")]
    waits: Annotated[ChartLines, note("queue times in seconds")]


class JobDocument(PageDocument, kw_only=True):
    """Job, or all jobs of a submission."""

    name: str
    jobs: list[FarmJob]
    events: Annotated[list[FarmEvent], note("newest first")]
    cases: list[FarmCase]
    total: Annotated[int, note("number of cases")]
    live: Annotated[bool, note("true if a job has not ended")]
    session: Annotated[SessionSummary | None, note("stored results, if they exist")]

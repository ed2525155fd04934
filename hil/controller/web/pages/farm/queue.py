"""Farm queue and jobs: position and reason, leases, events, outcomes of cases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse, Response

from hil.controller.farm.client.turns import add_turns
from hil.controller.farm.messages import ENDED, JobState, parse_job
from hil.controller.farm.timeline import QueueTimes
from hil.controller.records.lab.farm import FarmCases, FarmJob, FarmStats
from hil.controller.records.pages.farm import JobDocument, QueueDocument
from hil.controller.web.index.sessions import IndexedSession, find_session
from hil.controller.web.pages.farm.charts import SPANS, Chart, check_span, make_empty_chart, wait_chart
from hil.controller.web.pages.farm.farm_events import read_log_end
from hil.controller.web.pages.farm.view import (
    FarmView,
    is_update,
    parse_form,
    render_away_page,
    render_farm_page,
    view_of,
)
from hil.controller.web.site import get_site
from hil.controller.web.text.documents import describe, list_records
from hil.controller.web.text.requests import count_rows, is_saved, number_of
from hil.errors import FarmUnreachable, UsageError

router = APIRouter()
# Maximum rows: queued jobs by default, queued or running jobs at most, jobs of a submission, and ended jobs. The last
# constant limits the queued jobs to request from the farm.
_JOBS, _MOST_ROWS, _MOST_PARTS, _ENDED = 100, 200, 1000, 20
_MAX_QUEUED = 2000
# Maximum cases to show for a job or submission.
_CASES = 200


@router.get("/queue")
def queue(request: Request) -> Response:
    """Show queued jobs in order, running jobs, and the last ended jobs."""
    farm, hours = view_of(request), check_span(number_of(request, "hours", 24))
    limit = min(max(1, number_of(request, "limit", _JOBS)), _MOST_ROWS)
    page = min(max(1, number_of(request, "page", 1)), _MAX_QUEUED // limit)
    first, rows = (page - 1) * limit, count_rows(request, limit)
    try:
        stats: FarmStats = farm.ask("stats")
        waiting = farm.ask("queue", limit=min(first + rows, _MAX_QUEUED))[first:]
        running = farm.ask("jobs", state=[JobState.RUNNING.value], limit=count_rows(request, _MOST_ROWS))
        ended = farm.ask("jobs", state=[state.value for state in ENDED], limit=10 * _ENDED)
        chart, waits = (make_empty_chart(hours), []) if is_update(request) else read_waits(farm, hours)
    except FarmUnreachable as error:
        return render_away_page(request, error)
    ended = sorted(ended, key=lambda job: str(job.finished_at), reverse=True)[:_ENDED]
    pages = _Pages(limit, page, hours, first + len(waiting), stats.jobs.get(JobState.QUEUED.value, 0))
    values = {"stats": stats, "waiting": waiting, "running": running, "ended": ended, "pages": pages}
    return render_farm_page(
        request, "queue.html", {**values, "chart": chart, "waits": waits, "spans": SPANS, "farm": farm}
    )


@dataclass(frozen=True)
class _Pages:
    """Current page of the queue, with links to adjacent pages."""

    limit: int  # jobs per page
    page: int
    hours: int
    shown: int  # jobs on this and previous pages
    queued: int

    @property
    def left(self) -> int:
        """Number of queued jobs after this page."""
        return max(0, self.queued - self.shown)

    @property
    def more(self) -> bool:
        """True if there is a next page."""
        return bool(self.left) and (self.page + 1) * self.limit <= _MAX_QUEUED

    def at(self, page: int) -> str:
        """Return the query for another page."""
        asked = {"limit": self.limit, "page": page, "hours": self.hours}
        usual = {"limit": _JOBS, "page": 1, "hours": 24}
        return urlencode({name: value for name, value in asked.items() if value != usual[name]})


def read_waits(farm: FarmView, hours: int) -> tuple[Chart, list[QueueTimes]]:
    """Return queue times over a time span."""

    def make() -> tuple[Chart, list[QueueTimes]]:
        return wait_chart(farm.link.past.list_jobs(farm.ask), hours)

    return farm.link.get_recent(f"waits {hours}", make)


@router.get("/job")
def job(request: Request) -> Response:
    """Show a job, or all jobs of a submission."""
    farm, name = view_of(request), request.query_params.get("name", "")
    submission, _ = parse_job(name)
    try:
        jobs = read_jobs(farm, name)
        values = _fetch_details(farm, name, jobs, count_rows(request, _CASES))
        # A saved page cannot follow the log.
        values["printed"] = read_log_end(farm, name) if is_saved(request) else ""
    except FarmUnreachable as error:
        return render_away_page(request, error)
    values["session"] = _find_result_session(request, str(submission), name, jobs)
    return render_farm_page(request, "job.html", {**values, "name": name, "farm": farm})


def read_jobs(farm: FarmView, name: str) -> list[FarmJob]:
    """Return a job, or all jobs of a submission."""
    submission, number = parse_job(name)
    jobs = farm.ask("jobs", submission=submission, limit=_MOST_PARTS) if number is None else []
    return jobs if len(jobs) > 1 else [farm.ask("job", name=name)]


def _fetch_details(farm: FarmView, name: str, jobs: list[FarmJob], most: int) -> dict[str, Any]:
    """Return the details of a job: queue position, events, current outcomes of cases."""
    events = farm.ask("events", job=name)
    if (whole := name.partition(".")[0]) != name:
        events = sorted([*farm.ask("events", job=whole), *events], key=lambda one: one.id)
    live = any(one.state not in ENDED for one in jobs)
    found: FarmCases = farm.ask("cases", name=name, limit=most)
    return {
        "total": found.total,
        "cases": found.cases,
        "jobs": add_turns(farm.ask, jobs),
        "events": events[::-1],
        "live": live,
    }


def _find_result_session(request: Request, submission: str, name: str, jobs: list[FarmJob]) -> IndexedSession | None:
    """Return the stored session with a job's results, or None if it does not exist (yet)."""
    site, farm = get_site(request), view_of(request).link
    root = next((number for number, path in site.numbered.items() if path == farm.runs), None)
    if root is None:
        return None
    with site.reader.open_snapshot() as database:
        for one in dict.fromkeys((submission, f"{submission}/{name}")):
            try:
                return find_session(database, one, root)
            except UsageError:
                continue
    return None


@router.post("/job/cancel")
async def cancel(request: Request) -> Response:
    """Cancel a queued or running job."""
    form = await parse_form(request)
    await run_in_threadpool(view_of(request).do, "cancel", name=form.get("name", ""))
    return RedirectResponse("/queue", 303)


# URL parameters by path.
PARAMETERS = {
    "/queue": ("hours", "limit", "page"),
    "/job": ("name",),
}

_QUEUE_LISTS = ("waiting", "running", "ended")
# JSON documents by path and template.
DOCUMENTS = {
    "/queue": {
        "queue.html": describe(QueueDocument, waits="chart", **{name: list_records(name) for name in _QUEUE_LISTS})
    },
    "/job": {"job.html": describe(JobDocument, jobs=list_records("jobs"))},
}

"""Farm tables as CSV: boards, use, events, jobs, queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import UNSET

from hil.controller.farm import selector
from hil.controller.farm.client.turns import add_turns
from hil.controller.farm.client.wording import format_labels
from hil.controller.farm.messages import JobState
from hil.controller.farm.timeline import find_lease_periods
from hil.controller.records.base import Record
from hil.controller.records.lab.farm import JobDetails
from hil.controller.web.farm.past import MOST_EVENTS, MOST_JOBS
from hil.controller.web.pages.farm.boards import use_of
from hil.controller.web.pages.farm.charts import Chart, check_span
from hil.controller.web.pages.farm.queue import read_jobs, read_waits
from hil.controller.web.pages.farm.view import view_of
from hil.controller.web.templating import format_time
from hil.controller.web.text.csv_answer import respond_with_rows
from hil.controller.web.text.parameters import InvalidParameter
from hil.controller.web.text.requests import number_of

router = APIRouter()
_BOARDS = ("name", "state", "reason", "job", "user", "since", "site", "host", "hw_type", "checked_at", "failures")
_EVENTS = ("id", "at", "what", "board", "job", "lease", "host", "reason")
_LEASES = ("lease", "board", "fence", "granted_at", "ended_at", "reason")
_CASES = ("name", "outcome", "reason", "job")
MAX_CASES = 20_000
_JOBS = (
    *("name", "submission", "state", "title", "kind", "priority", "user", "board", "pinned", "selector", "queued_at"),
    *("started_at", "finished_at", "exit_code", "outcome", "reason", "attempts", "boards"),
)


@router.get("/boards.csv")
def boards_csv(request: Request) -> Response:
    """Return all boards, or the boards that match a selector."""
    wanted = selector.parse(request.query_params.get("select", ""))
    found = [one for one in view_of(request).ask("boards") if wanted.matches(one.labels)]
    return respond_with_rows(
        "boards", (*_BOARDS, "labels"), [(*_select_values(one, _BOARDS), format_labels(one.labels)) for one in found]
    )


@router.get("/events.csv")
def events_csv(request: Request) -> Response:
    """Return the events of the farm, a board or a job, oldest first."""
    asked = {name: value for name in ("board", "job") if (value := request.query_params.get(name, ""))}
    found = view_of(request).ask("events", **asked, limit=MOST_EVENTS)
    return respond_with_rows("events", _EVENTS, [_select_values(one, _EVENTS) for one in found])


@router.get("/jobs.csv")
def jobs_csv(request: Request) -> Response:
    """Return all jobs, or the jobs in a state, newest first."""
    state = request.query_params.get("state", "")
    if state and state not in [one.value for one in JobState]:
        raise InvalidParameter.choose("job state", state, [one.value for one in JobState])
    found = view_of(request).ask("jobs", limit=MOST_JOBS, **({"state": [state]} if state else {}))
    return respond_with_rows("jobs", _JOBS, [_select_values(one, _JOBS) for one in found])


@router.get("/queue.csv")
def queue_csv(request: Request) -> Response:
    """Return queued jobs in order, with reasons."""
    columns = ("position", "why", *_JOBS)
    found = view_of(request).ask("queue", limit=MOST_JOBS)
    return respond_with_rows("queue", columns, [_select_values(one, columns) for one in found])


@router.get("/queue/waits.csv")
def waits_csv(request: Request) -> Response:
    """Return queue times in seconds per interval."""
    _, found = read_waits(view_of(request), check_span(number_of(request, "hours", 24)))
    rows = [(format_time(one.since), one.jobs, one.half, one.most) for one in found]
    return respond_with_rows("waits", ("since", "jobs", "half_within_s", "95_of_100_within_s"), rows)


@router.get("/boards/use.csv")
def boards_use_csv(request: Request) -> Response:
    """Return the percentage of time with a job on each board that matches a selector."""
    farm, hours = view_of(request), check_span(number_of(request, "hours", 24))
    wanted, every = selector.parse(request.query_params.get("select", "")), farm.ask("boards")
    chart = use_of(farm, [one.name for one in every], hours)
    return _make_use_csv(chart.select_lines([one.name for one in every if wanted.matches(one.labels)]))


@router.get("/board/use.csv")
def board_use_csv(request: Request) -> Response:
    """Return the percentage of time with a job on a board."""
    name = request.query_params.get("name", "")
    return _make_use_csv(use_of(view_of(request), [name], check_span(number_of(request, "hours", 24)), board=name))


def _make_use_csv(chart: Chart) -> Response:
    rows = [
        (format_time(time), *(line[place] for line in chart.lines.values())) for place, time in enumerate(chart.times)
    ]
    return respond_with_rows("use", ("since", *chart.lines), rows)


@router.get("/board/leases.csv")
def board_leases_csv(request: Request) -> Response:
    """Return the leases of a board in the newest events."""
    farm, name = view_of(request), request.query_params.get("name", "")
    had = sorted(find_lease_periods(farm.link.past.events(farm.ask, name)), key=lambda one: one.lease, reverse=True)
    rows = [(one.job, one.lease, format_time(one.begun), format_time(one.ended), one.reason) for one in had]
    return respond_with_rows(f"leases of {name}", ("job", "lease", "begun", "ended", "reason"), rows)


@router.get("/job/jobs.csv")
def job_jobs_csv(request: Request) -> Response:
    """Return the jobs of a submission."""
    farm, name = view_of(request), request.query_params.get("name", "")
    columns = (*_JOBS, "position", "why")
    return respond_with_rows(
        f"job {name}", columns, [_select_values(one, columns) for one in add_turns(farm.ask, read_jobs(farm, name))]
    )


@router.get("/job/leases.csv")
def job_leases_csv(request: Request) -> Response:
    """Return the leases of a job."""
    farm, name = view_of(request), request.query_params.get("name", "")
    job: JobDetails = farm.ask("job", name=name)
    return respond_with_rows(
        f"leases of job {name}", _LEASES, [_select_values(one, _LEASES) for one in job.attempts_made]
    )


@router.get("/job/cases.csv")
def job_cases_csv(request: Request) -> Response:
    """Return the outcomes of a job's cases."""
    name = request.query_params.get("name", "")
    found = view_of(request).ask("cases", name=name, limit=MAX_CASES).cases
    return respond_with_rows(f"cases of job {name}", _CASES, [_select_values(one, _CASES) for one in found])


def _select_values(one: Record, names: Sequence[str]) -> list[Any]:
    values = [None if (value := getattr(one, name)) is UNSET else value for name in names]
    return [" ".join(value) if isinstance(value, list) else value for value in values]


# URL parameters by path.
PARAMETERS = {
    "/boards.csv": ("select",),
    "/boards/use.csv": ("hours", "select"),
    "/board/use.csv": ("name", "hours"),
    "/board/leases.csv": ("name",),
    "/events.csv": ("board", "job"),
    "/queue/waits.csv": ("hours",),
    "/jobs.csv": ("state",),
    "/job/jobs.csv": ("name",),
    "/job/leases.csv": ("name",),
    "/job/cases.csv": ("name",),
}

"""Home page: the last nights by suite and board, new failures and slower cases by cause, and the sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hil.controller.records.pages.sessions import CauseDocument, HomeDocument
from hil.controller.web.history.baseline import list_baselines
from hil.controller.web.history.changed_cases import MAX_CAUSES, NAMED_CASES, read_changes
from hil.controller.web.history.nights import NIGHTS, read_night_grid
from hil.controller.web.index import sessions
from hil.controller.web.site import WebSite, get_site
from hil.controller.web.text.csv_answer import MAX_ROWS, respond_with_rows
from hil.controller.web.text.documents import describe
from hil.controller.web.text.requests import count_rows, list_fields, parse_filter
from hil.errors import UsageError

router = APIRouter()


@dataclass(frozen=True)
class HomeFilter(sessions.SessionFilter):
    """Query parameters of the home page."""

    since: str = ""  # baseline: night:YYYY-MM-DD, branch:NAME or label:NAME; "" is the night before the newest

    @property
    def lists_sessions_only(self) -> bool:
        """True if the query filters, sorts or pages the sessions."""
        return bool(self.query(since="", page=self.page))


@router.get("/")
def index(request: Request) -> Response:
    """Show the last nights, new failures and slower cases, and the sessions that match a filter, newest first."""
    site, wanted = get_site(request), parse_filter(request, HomeFilter)
    part = request.headers.get("hx-target", "")
    values: dict[str, Any] = {}
    if part != "nights":
        with site.reader.open_snapshot() as database:
            values["found"] = sessions.list_sessions(database, wanted, count_rows(request, sessions.PAGE_ROWS))
            values["choices"] = {} if part == "sessions" else sessions.list_choices(database)
    if part != "sessions" and not wanted.lists_sessions_only:
        values |= _read_nights(site, wanted.since)
    return site.render_page(request, "sessions.html", asked=wanted, roots=site.roots, **values)


def _read_nights(site: WebSite, since: str) -> dict[str, Any]:
    with site.reader.open_snapshot() as database:
        grid = read_night_grid(database)
    return {
        "grid": grid,
        "changes": read_changes(site, since),
        "baselines": site.memo.get("baselines", lambda database: list_baselines(database, NIGHTS)),
        "max_causes": MAX_CAUSES,
        "named_cases": NAMED_CASES,
        "triage": site.triage.read(),
    }


@router.get("/cause")
def cause(request: Request) -> Response:
    """Show the cases of a cause."""
    site, query = get_site(request), request.query_params
    changes = read_changes(site, query.get("since", ""))
    found = changes.find_cause(query.get("key", ""))
    if found is None:
        raise UsageError("no such cause since this baseline", hint="the cases may pass now; see the home page")
    rows = changes.list_rows(found)[: count_rows(request, sessions.PAGE_ROWS * 5)]
    return site.render_page(
        request, "cause.html", cause=found, rows=rows, baseline=changes.baseline, triage=site.triage.read()
    )


_CHANGE = ("cause", "what", "case", "board", "suite", "flow", "model", "op", "outcome", "before_ns", "after_ns")
_NIGHT = ("suite", "flow", "board", "night", "verdict", "outcomes", "session")


@router.get("/changes.csv")
def changes_csv(request: Request) -> Response:
    """Return the changed cases since a baseline, with their causes. ``key`` selects a cause."""
    site, query = get_site(request), request.query_params
    changes = read_changes(site, query.get("since", ""))
    if changes.baseline.is_empty:
        # Programs would read an empty file as success.
        text = f"nothing to compare: no earlier session of {changes.baseline.kind} {changes.baseline.value!r}"
        raise UsageError(text, hint="select another baseline")
    chosen = [one for one in changes.causes if query.get("key", "") in ("", one.key)]
    rows = [
        (
            *(one.title, row.change.what, row.change.case, row.change.board, row.change.suite, row.change.flow),
            *(row.change.model, row.change.op, row.change.outcome, row.before, row.after),
        )
        for one in chosen
        for row in changes.list_rows(one)
    ]
    return respond_with_rows("changes", _CHANGE, rows)


@router.get("/nights.csv")
def nights_csv(request: Request) -> Response:
    """Return the cells of the grid of nights."""
    with get_site(request).reader.open_snapshot() as database:
        grid = read_night_grid(database, most=MAX_ROWS)
    rows = [
        (row.suite, row.flow, row.board, night, cell.verdict, ", ".join(text for _, text in cell.texts), cell.link)
        for row in grid.rows
        for night, cell in zip(grid.nights, row.cells, strict=True)
        if cell is not None
    ]
    return respond_with_rows("nights", _NIGHT, rows)


# URL parameters by path.
PARAMETERS = {
    "/": list_fields(HomeFilter),
    "/cause": ("since", "key"),
    "/changes.csv": ("since", "key"),
}

# JSON documents by path and template.
DOCUMENTS = {
    "/": {
        "sessions.html": describe(
            HomeDocument, sessions="found.sessions", total="found.total", pages="found.pages", nights="grid"
        )
    },
    "/cause": {"cause.html": describe(CauseDocument, cases="rows")},
}

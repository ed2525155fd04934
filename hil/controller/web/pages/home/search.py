"""Search for cases and sessions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hil.controller.records.pages.sessions import SearchDocument
from hil.controller.web.index.sessions import SessionFilter, list_sessions
from hil.controller.web.session.case_search import FIELDS, LAYER, MAX_RESULTS, ROWS, SearchQuery, search_cases
from hil.controller.web.site import get_site
from hil.controller.web.templating import format_time
from hil.controller.web.text.csv_answer import respond_with_rows
from hil.controller.web.text.documents import describe
from hil.controller.web.text.requests import count_rows, list_fields, parse_filter

router = APIRouter()
# Maximum sessions on the page. The list of sessions shows all.
_SESSIONS = 10
_COLUMNS = ("case", "outcome", "layer", "message", "model", "board", "session", "root", "started", "results")


@router.get("/search")
def search(request: Request) -> Response:
    """Show the cases and sessions that contain all words, best match first."""
    site, wanted = get_site(request), parse_filter(request, SearchQuery)
    with site.reader.open_snapshot() as database:
        found = search_cases(database, wanted, count_rows(request, ROWS))
        sessions = list_sessions(database, SessionFilter(q=wanted.q), _SESSIONS)
    return site.render_page(
        request,
        "search.html",
        asked=wanted,
        found=found,
        sessions=sessions,
        fields=(*FIELDS, LAYER),
        max_results=MAX_RESULTS,
    )


@router.get("/search.csv")
def search_csv(request: Request) -> Response:
    """Return the cases that contain all words, best match first."""
    wanted = parse_filter(request, SearchQuery)
    with get_site(request).reader.open_snapshot() as database:
        found = search_cases(database, wanted, MAX_RESULTS).cases
    rows = [
        (
            *(one.case["name"], one.case["outcome"], one.layer, one.case["message"], one.case["model"]),
            *(one.case["board"], one.session.id, one.session.root, format_time(one.session.created), one.results),
        )
        for one in found
    ]
    return respond_with_rows("search", _COLUMNS, rows)


# URL parameters by path.
PARAMETERS = {
    "/search": list_fields(SearchQuery),
    "/search.csv": ("q",),
}

# JSON documents by path and template.
DOCUMENTS = {
    "/search": {
        "search.html": describe(
            SearchDocument,
            cases="found.cases",
            total="found.total",
            pages="found.pages",
            is_cut="found.is_cut",
            sessions="sessions.sessions",
            total_sessions="sessions.total",
        )
    },
}

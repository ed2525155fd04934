"""List of stored gates. The page of a session shows the verdicts of a gate."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hil.controller.records.pages.sessions import GatePageDocument
from hil.controller.web.index import sessions
from hil.controller.web.site import get_site
from hil.controller.web.text.addresses import PageQuery
from hil.controller.web.text.documents import describe
from hil.controller.web.text.requests import count_rows, list_fields, parse_filter

router = APIRouter()


@dataclass(frozen=True)
class GateFilter(PageQuery):
    """Query parameters of the list of gates."""

    page: int = 1


@router.get("/gates")
def gates(request: Request) -> Response:
    """List the stored gates, newest first."""
    site, wanted = get_site(request), parse_filter(request, GateFilter)
    every = sessions.SessionFilter(kind="gate", page=wanted.page)
    with site.reader.open_snapshot() as database:
        found = sessions.list_sessions(database, every, count_rows(request, sessions.PAGE_ROWS))
    return site.render_page(request, "gates.html", asked=wanted, found=found)


# URL parameters by path.
PARAMETERS = {
    "/gates": list_fields(GateFilter),
}

# JSON documents by path and template.
DOCUMENTS = {
    "/gates": {
        "gates.html": describe(GatePageDocument, gates="found.sessions", total="found.total", pages="found.pages")
    },
}

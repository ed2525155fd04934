"""Compare two sides: sessions, sets of sessions, boards, compilers, programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from hil.controller.records.pages.measurements import CompareDocument
from hil.controller.web.compare import compared, comparing
from hil.controller.web.index import sessions
from hil.controller.web.index.series import make_history_query
from hil.controller.web.session import sides
from hil.controller.web.site import get_site
from hil.controller.web.text.documents import API, describe, is_json
from hil.controller.web.text.requests import count_rows, list_fields, number_of, parse_filter
from hil.errors import UsageError

router = APIRouter()
# Maximum sessions in the form. Users can select other sessions in the list of sessions.
_OFFERED = 100


@router.get("/compare")
def compare(request: Request) -> Response:
    """Compare side ``b`` with the baseline ``a``, by default the previous session. Without sides, show the form."""
    site, view = get_site(request), parse_filter(request, compared.ComparisonQuery)
    query = request.query_params
    with site.reader.open_snapshot() as database:
        if marked := query.getlist("s"):
            return _redirect_marked(request, [sides.get_session(database, one) for one in dict.fromkeys(marked)])
        a, b = (
            sides.choose_side(
                database, query.getlist(side), sides.parse_filters(query, side), number_of(request, f"{side}.last", 10)
            )
            for side in ("a", "b")
        )
        found, tables = None, []
        if b and not a:
            a = (
                _offer_side(sides.find_baseline(database, b.sessions[0]))
                if len(b.sessions) == 1 and not b.only
                else None
            )
        if a and b:
            found = comparing.compare_sides(database, a, b)
            tables = compared.list_tables(found, view, count_rows(request, compared.ROWS))
        offered = sessions.list_sessions(database, sessions.SessionFilter(), _OFFERED).sessions
        choices = sessions.list_choices(database)
    return site.render_page(
        request,
        "compare.html",
        a=a,
        b=b,
        found=found,
        view=view,
        tables=tables,
        titles=compared.TITLES,
        fixed=sides.query_of(a, b),
        pairs=parse_qsl(sides.query_of(a, b)),
        swapped=sides.query_of(b, a),
        notes=list(sides.iter_differences(a, b)) if a and b else [],
        benches=compared.list_bench_verdicts([*a.sessions, *b.sessions]) if a and b else [],
        offered=offered,
        choices=choices,
        filters=sides.FILTERS,
        history=make_history_query,
        most=sides.MAX_SESSIONS,
    )


def _offer_side(session: sessions.IndexedSession | None) -> sides.ComparedSide | None:
    return sides.ComparedSide([session], offered=True) if session else None


def _redirect_marked(request: Request, marked: list[sessions.IndexedSession]) -> Response:
    """Redirect to a comparison of the newest marked session with the other marked sessions."""
    if len(marked) > sides.MAX_SESSIONS:
        raise UsageError(f"{len(marked)} sessions marked: at most {sides.MAX_SESSIONS} can form a side")
    *others, newest = sorted(marked, key=lambda one: one.created or 0.0)
    a = sides.ComparedSide(others) if others else None
    start = API if is_json(request) else ""
    return RedirectResponse(f"{start}/compare?{sides.query_of(a, sides.ComparedSide([newest]))}", 303)


def _count_moves(values: Mapping[str, Any]) -> Mapping[str, int]:
    found: comparing.ComparisonResult | None = values["found"]
    return {} if found is None else found.counts


# URL parameters by path.
PARAMETERS = {
    "/compare": (*sides.PARAMETERS, "s", *list_fields(compared.ComparisonQuery)),
}

# JSON documents by path and template.
DOCUMENTS = {
    "/compare": {"compare.html": describe(CompareDocument, counts=_count_moves, device_ratio="found.device_ratio")},
}

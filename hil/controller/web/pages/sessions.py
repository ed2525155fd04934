"""List of sessions, a session with cases, and a case with all stored data."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hil.controller.web.history.run_series import list_series_ids
from hil.controller.web.index import sessions
from hil.controller.web.index.profiles import list_named_profiles, make_show_hint
from hil.controller.web.session.records import read_detail
from hil.controller.web.session.session_view import view_session
from hil.controller.web.session.sides import find_baseline
from hil.controller.web.site import get_site
from hil.controller.web.tables import ROWS
from hil.controller.web.tensors.tensors import find_kept_tensors
from hil.controller.web.text.requests import count_rows, number_of, parse_filter

router = APIRouter()


@router.get("/")
def index(request: Request) -> Response:
    """List the sessions that match a filter, newest first."""
    site, wanted = get_site(request), parse_filter(request, sessions.SessionFilter)
    with site.reader.open_snapshot() as database:
        found = sessions.list_sessions(database, wanted, count_rows(request, sessions.PAGE_ROWS))
        choices = sessions.list_choices(database)
    return site.render_page(request, "sessions.html", asked=wanted, found=found, choices=choices, roots=site.roots)


@router.get("/session")
def session(request: Request) -> Response:
    """Show a session with its outcome and cases."""
    site, wanted = get_site(request), parse_filter(request, sessions.CaseFilter)
    with site.reader.open_snapshot() as database:
        one = sessions.find_session(database, request.query_params.get("id", ""), number_of(request, "root"))
        cases = sessions.list_cases(database, one, wanted, count_rows(request, sessions.PAGE_ROWS))
        view, baseline = view_session(database, one, count_rows(request, ROWS)), find_baseline(database, one)
    known = list_series_ids(site.history) if one.kind == "gate" else frozenset()
    return site.render_page(
        request,
        "session.html",
        session=one,
        asked=wanted,
        found=cases,
        view=view,
        baseline=baseline,
        known_series=known,
    )


@router.get("/case")
def case(request: Request) -> Response:
    """Show a case: outcome, reason, statistics, times, provenance, logs, and the command that repeats it."""
    site = get_site(request)
    with site.reader.open_snapshot() as database:
        one = sessions.find_session(database, request.query_params.get("id", ""), number_of(request, "root"))
        row = sessions.find_case(database, one, request.query_params.get("case", ""))
    detail = read_detail(one, row)
    named = list_named_profiles(site.roots, Path(one.folder), str(row["name"]), detail.profiles)
    profiles = [(profile, make_show_hint(profile)) for profile in named]
    return site.render_page(
        request,
        "case.html",
        session=one,
        case=row,
        detail=detail,
        profiles=profiles,
        kept=find_kept_tensors(one, detail),
    )

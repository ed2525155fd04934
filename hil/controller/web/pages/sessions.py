"""A session with its cases, and a case with all stored data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hil.controller.records.decisions.triage import MAX_TRIAGE_CHARS, TRIAGE_STATES
from hil.controller.records.pages.sessions import CaseDocument, SessionDocument
from hil.controller.storage.outcomes import is_failing
from hil.controller.web.history.run_series import list_series_ids
from hil.controller.web.index import sessions
from hil.controller.web.index.profiles import list_named_profiles, make_show_hint
from hil.controller.web.session.records import read_detail
from hil.controller.web.session.session_view import view_session
from hil.controller.web.session.sides import find_baseline
from hil.controller.web.site import get_site
from hil.controller.web.tables import ROWS
from hil.controller.web.tensors.tensors import find_kept_tensors
from hil.controller.web.text.addresses import find_issue_link
from hil.controller.web.text.documents import describe
from hil.controller.web.text.requests import SESSION, count_rows, list_fields, number_of, parse_filter

router = APIRouter()
# Fields of a case's detail that the JSON document contains.
_DETAILS = (
    *("against", "outputs", "others", "disagreement", "hint", "detail", "facts", "evidence", "attempts", "repeat"),
)


@router.get("/session")
def session(request: Request) -> Response:
    """Show a session with its outcome and cases."""
    site, wanted = get_site(request), parse_filter(request, sessions.CaseFilter)
    with site.reader.open_snapshot() as database:
        one = sessions.resolve_session(database, request.query_params.get("id", ""), number_of(request, "root"))
        ordered = wanted if wanted.order else replace(wanted, order=sessions.FAILING_FIRST)
        cases = sessions.list_cases(database, one, ordered, count_rows(request, sessions.PAGE_ROWS))
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
        triage=site.triage.read(),
    )


@router.get("/case")
def case(request: Request) -> Response:
    """Show a case: outcome, reason, statistics, times, provenance, logs, and the command that repeats it."""
    site = get_site(request)
    with site.reader.open_snapshot() as database:
        one = sessions.resolve_session(database, request.query_params.get("id", ""), number_of(request, "root"))
        row = sessions.find_case(database, one, request.query_params.get("case", ""))
    detail, triage = read_detail(one, row), site.triage.read()
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
        triage=triage,
        triaged=triage.find(row["name"], one.suite, row["flow"], row["board"], row["runtime"]),
        fails=is_failing(row["ended"] or row["outcome"] or "SKIP"),
        states=TRIAGE_STATES,
        most_chars=MAX_TRIAGE_CHARS,
        issue_link=find_issue_link,
    )


# URL parameters by path.
PARAMETERS = {
    "/session": (*SESSION, *list_fields(sessions.CaseFilter)),
    "/case": (*SESSION, "case"),
}

# JSON documents by path and template.
DOCUMENTS = {
    "/session": {
        "session.html": describe(
            SessionDocument,
            cases="found.cases",
            total="found.total",
            pages="found.pages",
            table="view.table",
            missing="view.missing",
            missing_count="view.missing_count",
            resume="view.go_on",
            notes="view.notes",
            parent="view.parent",
            children="view.children",
            files="view.files",
            previous="baseline",
        )
    },
    "/case": {
        "case.html": describe(
            CaseDocument,
            **{name: f"detail.{name}" for name in _DETAILS},
            tensors="kept.subjects",
            triage="triaged",
            record="detail.short_record",
        )
    },
}

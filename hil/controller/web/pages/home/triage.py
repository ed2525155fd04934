"""Triage of failures: the list of entries, the form of the case page, and the JSON document for `--known`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse, Response

from hil.controller.records.decisions.triage import HIDDEN, TRIAGE_STATES, TriageEntry
from hil.controller.records.pages.sessions import TriagePageDocument
from hil.controller.web.index.sessions import IndexedSession, find_case, find_session
from hil.controller.web.site import WebSite, get_site
from hil.controller.web.templating import format_time
from hil.controller.web.text.addresses import PageQuery, choose_page, find_issue_link
from hil.controller.web.text.csv_answer import respond_with_rows
from hil.controller.web.text.documents import describe
from hil.controller.web.text.requests import count_rows, list_fields, parse_filter, parse_number
from hil.controller.workloads.suites.expected import choose_table_of
from hil.controller.workloads.triage.entries import OUTCOMES, SCOPE, find_same, make_entry, put_entry, remove_entry
from hil.controller.workloads.triage.triage_file import encode_triage, update_triage
from hil.core.results import Outcome
from hil.errors import UsageError

router = APIRouter()
ROWS = 100
_MAX_FIELDS = 30
_COLUMNS = (
    *("state", "until", "case", "suite", "flow", "board", "runtime", "outcomes", "owner", "issue", "note", "changed"),
)


@dataclass(frozen=True)
class TriageFilter(PageQuery):
    """Query parameters of the list of entries. "" matches all."""

    q: str = ""  # words that the case, owner, issue or note must contain
    state: str = field(default="", metadata={"choices": TRIAGE_STATES})
    page: int = 1

    def selects(self, entry: TriageEntry) -> bool:
        """Return True if an entry matches."""
        text = " ".join((entry.case, entry.suite, entry.board, entry.owner, entry.issue, entry.note)).lower()
        return self.state in ("", entry.state) and all(word in text for word in self.q.lower().split())


@router.get("/triage")
def triage(request: Request) -> Response:
    """List the triage entries, last changed first."""
    site, wanted = get_site(request), parse_filter(request, TriageFilter)
    view = site.triage.read()
    found = _select(view.entries, wanted)
    rows = count_rows(request, ROWS)
    first, pages = choose_page(wanted.page, len(found), rows)
    return site.render_page(
        request,
        "triage.html",
        asked=wanted,
        view=view,
        rows=found[first : first + rows],
        paging={"pages": pages, "total": len(found)},
        states=TRIAGE_STATES,
        file=str(site.triage.path),
        issue_link=find_issue_link,
    )


@router.get("/triage.csv")
def triage_csv(request: Request) -> Response:
    """Return the triage entries that match a filter."""
    wanted = parse_filter(request, TriageFilter)
    found = _select(get_site(request).triage.read().entries, wanted)
    rows = []
    for one in found:
        values = one.to_json() | {"outcomes": ", ".join(one.outcomes), "changed": format_time(one.changed or None)}
        rows.append([values[name] for name in _COLUMNS])
    return respond_with_rows("triage", _COLUMNS, rows)


@router.get("/triage.json")
def triage_json(request: Request) -> Response:
    """Return the triage file, for `--known URL`."""
    view = get_site(request).triage.read()
    if view.error:
        raise UsageError(view.error)
    return Response(encode_triage(view.entries), media_type="application/json")


@router.post("/triage")
async def change(request: Request) -> Response:
    """Add, change or remove an entry, from the form of a case page or of the list."""
    if not getattr(request.state, "may_change", False):
        raise HTTPException(403, "Token required to change the triage: start `hil web` with --token.")
    try:
        given = dict(parse_qsl((await request.body()).decode(), max_num_fields=_MAX_FIELDS, keep_blank_values=True))
    except ValueError as error:
        raise UsageError("invalid form data") from error
    site = get_site(request)
    back = await run_in_threadpool(_change, site, given)
    return RedirectResponse(back, 303)


def _select(entries: Sequence[TriageEntry], wanted: TriageFilter) -> list[TriageEntry]:
    return sorted(filter(wanted.selects, entries), key=lambda one: (-one.changed, one.case))


def _change(site: WebSite, given: Mapping[str, str]) -> str:
    """Apply a form. Return the address of the next page."""
    if "remove" in given:
        entry = make_entry(case=given.get("case", ""), state="new", **{name: given.get(name, "") for name in SCOPE})
        update_triage(site.triage.path, lambda entries: remove_entry(entries, entry))
        return "/triage" if not given.get("id") else _make_case_address(given)
    with site.reader.open_snapshot() as database:
        session = find_session(database, given.get("id", ""), parse_number("root", given.get("root", "")))
        row = find_case(database, session, given.get("case", ""))
    values = _make_values(given, session, row)

    def put(entries: Sequence[TriageEntry]) -> Sequence[TriageEntry]:
        same = find_same(entries, make_entry(**{**values, "until": None, "state": "new"}))
        kept: dict[str, Any] = {"excluded": same.excluded} if same is not None else {}
        if not given.get("any_outcome"):
            kept |= _choose_outcomes(row, same)
            if not kept["outcomes"] and values["state"] in HIDDEN:
                hint = 'select "for any outcome", or open a session in which the case fails'
                raise UsageError("no outcome of this case can be known", hint=hint)
        return put_entry(entries, make_entry(**values, **kept, changed=time.time()))

    update_triage(site.triage.path, put)
    return _make_case_address(given)


def _make_values(given: Mapping[str, str], session: IndexedSession, row: Any) -> dict[str, Any]:
    """Return the values of an entry from the form of a case page."""
    state = given.get("state", "")
    return {
        "case": row["name"],
        "suite": session.suite,
        "flow": row["flow"],
        "board": "" if given.get("all_boards") else row["board"],
        "runtime": row["runtime"],
        "state": state,
        "until": (given.get("until") or None) if state == "wontfix" else None,
        **{name: " ".join(given.get(name, "").split()) for name in ("owner", "issue", "note")},
    }


def _choose_outcomes(row: Any, same: TriageEntry | None) -> dict[str, Any]:
    """Return the outcomes of an entry: those of the existing entry, and the outcome of this case if it failed."""
    ended = row["ended"] or row["outcome"]
    outcomes = list(same.outcomes) if same is not None else []
    stage: str = same.stage if same is not None else ""
    if ended == Outcome.TIMEOUT.value:
        table = choose_table_of(ended, row["stage"])
        stage = table if ended not in outcomes or stage == table else ""
    if ended in OUTCOMES and ended not in outcomes:
        outcomes.append(ended)
    return {"outcomes": outcomes, "stage": stage}


def _make_case_address(given: Mapping[str, str]) -> str:
    names = {name: given[name] for name in ("id", "root", "case") if given.get(name)}
    return f"/case?{urlencode(names)}#triage"


# URL parameters by path.
PARAMETERS = {
    "/triage": list_fields(TriageFilter),
    "/triage.csv": list_fields(TriageFilter),
}

# JSON documents by path and template.
DOCUMENTS = {
    "/triage": {
        "triage.html": describe(
            TriagePageDocument, entries="rows", total="paging.total", pages="paging.pages", error="view.error"
        )
    },
}

"""History of a case, history of a suite, and regressions."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse, Response

from hil.controller.records.pages.measurements import (
    CaseHistoryDocument,
    CasePoint,
    HistoryDocument,
    RegressionsDocument,
    SuiteHistoryDocument,
    SuitePoint,
)
from hil.controller.web.history import charts, regressions, suite_history
from hil.controller.web.history import remarks as remarks_file
from hil.controller.web.history.changed_cases import MAX_CAUSES, NAMED_CASES, read_changes
from hil.controller.web.history.flakiness import measure_flakiness
from hil.controller.web.history.nights import format_night, night_of
from hil.controller.web.index import series
from hil.controller.web.index.sessions import find_session
from hil.controller.web.pages.trends.paging import choose_newest
from hil.controller.web.site import WebSite, get_site
from hil.controller.web.templating import format_time
from hil.controller.web.text.csv_answer import AT_A_TIME, MAX_ROWS, Rows, respond_with_pages, respond_with_rows
from hil.controller.web.text.documents import describe, list_numbered
from hil.controller.web.text.requests import count_rows, list_fields, parse_filter, parse_number
from hil.controller.workloads.history.entry_changes import describe_changed_stacks
from hil.errors import UsageError

router = APIRouter()
ROWS, _SUITES = 100, 200
_FIELDS = ("case", "kind", "suite", "flow", "runtime", "board", "model", "place", "what", "x")


@router.get("/history")
def history(request: Request) -> Response:
    """Show the history of a case or suite. Without either, list suites and search for cases."""
    site, wanted = get_site(request), parse_filter(request, series.HistoryFilter)
    with site.reader.open_snapshot() as database:
        if wanted.case:
            return _render_case(site, request, database, wanted)
        if wanted.suite:
            return _render_suite(site, request, database, wanted)
        suites = suite_history.list_suites(database, _SUITES)
        query = request.query_params.get("q", "").strip()
        names = []
        if query:
            rows = database.execute(
                "select word from words where instr(lower(word), ?)"
                " and exists (select 1 from cases where name = words.key) limit 200",
                (query.lower(),),
            )
            names = [row[0] for row in rows]
    return site.render_page(request, "history.html", suites=suites, query_text=query, names=names)


def _render_case(
    site: WebSite, request: Request, database: sqlite3.Connection, wanted: series.HistoryFilter
) -> Response:
    measure = series.measure_of(wanted)
    choices = series.list_identities(database, wanted)
    if not choices:
        raise UsageError(
            f"case {wanted.case!r} not found with that kind, suite, flow, runtime, board and model",
            hint="see a session's table of cases",
        )
    identity, _ = choices[0]
    found = series.read_series(database, wanted.case, identity, measure)
    remarks = _find_remarks(site, found.points, wanted.case)
    rows, paging = choose_newest(request, wanted.page, found.points, ROWS)
    return site.render_page(
        request,
        "history_case.html",
        asked=wanted,
        measure=measure,
        measures=series.MEASURES,
        choices=choices,
        identity=identity,
        found=found,
        steps={one.index: one for one in found.steps},
        packages=sorted({name for one in found.points[-20:] for name in one.versions}),
        remarks=remarks,
        flakiness=measure_flakiness([one.outcome for one in found.points]),
        chart=charts.make_case_chart(found, measure, wanted, remarks),
        stacks=describe_changed_stacks([one.stack for one in found.points]),
        has_stack=any(one.stack is not None for one in found.points),
        rows=rows,
        paging=paging,
        unit=charts.UNITS.get(measure.column, ""),
        most_chars=remarks_file.MAX_CHARS,
    )


def _render_suite(
    site: WebSite, request: Request, database: sqlite3.Connection, wanted: series.HistoryFilter
) -> Response:
    found = suite_history.read_suite(database, wanted.suite, wanted.flow, wanted.board, wanted.runtime, wanted.place)
    if not found.samples:
        raise UsageError(f"suite {wanted.suite!r} not found with that flow, board and runtime")
    remarks = _find_remarks(site, [one.session for one in found.samples], "")
    times = [one.session.created for one in found.samples]
    kinds = [one.session.verdict for one in found.samples]
    rows, paging = choose_newest(request, wanted.page, found.samples, ROWS)
    shown = [
        charts.make_plain_chart(title, unit, times, one.values, one.judged, one.levels, worse, kinds, sorted(remarks))
        for title, unit, one, worse in (
            ("passing", "%", found.rate, -1),
            ("device time of all cases", "ns", found.device, 1),
        )
        if one.judged
    ]
    return site.render_page(
        request,
        "history_suite.html",
        asked=wanted,
        found=found,
        charts=shown,
        remarks=remarks,
        rows=rows,
        paging=paging,
        most_chars=remarks_file.MAX_CHARS,
    )


def _find_remarks(site: WebSite, points: Sequence[Any], case: str) -> dict[int, list[remarks_file.Annotation]]:
    """Return the remarks per point: on the case and on its session."""
    told: defaultdict[tuple[int, str], list[remarks_file.Annotation]] = defaultdict(list)
    for one in remarks_file.read_annotations(site.roots):
        if one.case in ("", case):
            told[one.root, one.session].append(one)
    return {index: told[point.root, point.id] for index, point in enumerate(points) if (point.root, point.id) in told}


@router.post("/history/annotate")
async def annotate(request: Request) -> Response:
    """Add, change or delete a remark on a session in a history."""
    if not getattr(request.state, "may_change", False):
        raise HTTPException(403, "Token required to write remarks: start `hil web` with --token.")
    try:
        given = dict(parse_qsl((await request.body()).decode(), max_num_fields=30, keep_blank_values=True))
    except ValueError as error:
        raise UsageError("invalid form data") from error
    site = get_site(request)
    root = parse_number("root", given.get("root", ""))

    def write() -> None:
        with site.reader.open_snapshot() as database:
            session = find_session(database, given.get("session", ""), root)
        folder = site.numbered[session.root]
        if corrects := given.get("corrects", ""):
            if not (told := given.get("text", "").strip()) and "remove" not in given:
                raise UsageError("empty remark", hint="use Delete to remove a remark")
            remarks_file.correct_remark(folder, corrects, "" if "remove" in given else told)
            return
        remarks_file.annotate(folder, session.id, given.get("case", ""), given.get("text", ""))

    await run_in_threadpool(write)
    back = series.HistoryFilter(**{name: given.get(name, "") for name in _FIELDS})  # type: ignore[arg-type]
    return RedirectResponse(f"/history?{back.query()}", 303)


@router.get("/history/regressions")
def regressed(request: Request) -> Response:
    """Show all cases that fail or are slower since a date."""
    site, wanted = get_site(request), parse_filter(request, regressions.RegressionFilter)
    with site.reader.open_snapshot() as database:
        found = regressions.list_regressions(database, wanted, count_rows(request, regressions.ROWS))
    # The night before the date, because a baseline's own changes are old. Sessions begin in 1970.
    night = max(night_of(regressions.parse_since(wanted.since)) - 1, -1)
    changes = read_changes(site, f"night:{format_night(night)}")
    shown: dict[str, Any] = {"max_causes": MAX_CAUSES, "named_cases": NAMED_CASES, "triage": site.triage.read()}
    return site.render_page(request, "regressions.html", asked=wanted, found=found, changes=changes, **shown)


@router.get("/history/suites.csv")
def suites_csv(request: Request) -> Response:
    """Return suites with a history, latest first."""
    with get_site(request).reader.open_snapshot() as database:
        found = suite_history.list_suites(database, MAX_ROWS + 1)
    rows = [
        (
            one["suite"],
            one["flow"],
            ", ".join(filter(None, one["boards"].split("\n"))),
            one["count"],
            format_time(one["last"]),
        )
        for one in found
    ]
    return respond_with_rows("suites", ("suite", "flow", "boards", "sessions", "last"), rows)


@router.get("/history.csv")
def history_csv(request: Request) -> Response:
    """Return the samples of a case, or the sessions of a suite, newest first.

    Raises UsageError if the query has neither.
    """
    site, wanted = get_site(request), parse_filter(request, series.HistoryFilter)
    with site.reader.open_snapshot() as database:
        if wanted.case:
            return _make_case_csv(site, database, wanted)
        if not wanted.suite:
            raise UsageError("case or suite required")
        found = suite_history.read_suite(
            database, wanted.suite, wanted.flow, wanted.board, wanted.runtime, wanted.place
        )
    remarks = _find_remarks(site, [one.session for one in found.samples], "")
    rows = [
        (
            *_list_session_columns(one.session),
            *(one.session.verdict, one.rate, one.session.failing, one.session.cases, one.device_ns),
            *("; ".join(one.session.boards), _join_remarks(remarks, index)),
        )
        for index, one in reversed(list(enumerate(found.samples)))
    ]
    columns = ("verdict", "passing_percent", "failing", "cases", "device_ns", "boards", "remarks")
    return respond_with_rows(f"history of {wanted.suite}", (*_WHERE, *columns), rows)


def _make_case_csv(site: WebSite, database: sqlite3.Connection, wanted: series.HistoryFilter) -> Response:
    measure = series.measure_of(wanted)
    choices = series.list_identities(database, wanted)
    if not choices:
        raise UsageError(f"case {wanted.case!r} not found with that kind, suite, flow, runtime, board and model")
    found = series.read_series(database, wanted.case, choices[0][0], measure)
    remarks, steps = _find_remarks(site, found.points, wanted.case), {one.index for one in found.steps}
    stacks = describe_changed_stacks([one.stack for one in found.points])
    rows = [
        (
            *_list_session_columns(one),
            one.outcome,
            one.value,
            index in steps,
            one.iterations,
            one.grade,
            one.compilers,
            _join_remarks(remarks, index),
            stacks[index],
        )
        for index, one in reversed(list(enumerate(found.points)))
    ]
    columns = ("outcome", measure.column, "level_begins", "iterations", "grade", "compilers", "remarks", "stack")
    return respond_with_rows(f"history of {wanted.case}", (*_WHERE, *columns), rows)


_WHERE = ("session", "root", "begun", "branch", "commit")


def _list_session_columns(one: Any) -> tuple[Any, ...]:
    return (one.id, one.root, format_time(one.created), one.branch, one.commit)


def _join_remarks(remarks: Mapping[int, Sequence[remarks_file.Annotation]], index: int) -> str:
    return "; ".join(one.text for one in remarks.get(index, ()))


_REGRESSION = (
    *("created", "what", "over", "case", "before_ns", "after_ns", "ratio", "title", "board"),
    *("earlier_commit", "commit", "message"),
)


@router.get("/history/regressions.csv")
def regressions_csv(request: Request) -> Response:
    """Return the cases that fail or are slower since a date."""
    site, wanted = get_site(request), parse_filter(request, regressions.RegressionFilter)

    def read_part(page: int) -> tuple[Rows, int]:
        with site.reader.open_snapshot() as database:
            found = regressions.list_regressions(database, replace(wanted, page=page), AT_A_TIME)
        rows = [
            vars(one)
            | {"created": format_time(one.created), "before_ns": one.before, "after_ns": one.after, "ratio": one.ratio}
            for one in found.found
        ]
        return [[row[name] for name in _REGRESSION] for row in rows], found.pages

    return respond_with_pages("regressions", _REGRESSION, read_part)


def _list_suite_choices(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{**dict(one), "boards": [*filter(None, one["boards"].split("\n"))]} for one in values["suites"]]


def _join_remark_lists(values: Mapping[str, Any]) -> list[remarks_file.Annotation]:
    return [one for found in values["remarks"].values() for one in found]


# URL parameters by path.
PARAMETERS = {
    "/history": (*list_fields(series.HistoryFilter), "q"),
    "/history.csv": list_fields(series.HistoryFilter),
    "/history/regressions": list_fields(regressions.RegressionFilter),
    "/history/regressions.csv": list_fields(regressions.RegressionFilter),
}

# JSON documents by path and template.
DOCUMENTS = {
    "/history": {
        "history.html": describe(HistoryDocument, suites=_list_suite_choices),
        "history_case.html": describe(
            CaseHistoryDocument,
            case="asked.case",
            column="measure.column",
            points=list_numbered(CasePoint),
            total="paging.total",
            pages="paging.pages",
            steps="found.steps",
            remarks=_join_remark_lists,
        ),
        "history_suite.html": describe(
            SuiteHistoryDocument,
            suite="asked.suite",
            points=list_numbered(SuitePoint),
            total="paging.total",
            pages="paging.pages",
            remarks=_join_remark_lists,
        ),
    },
    "/history/regressions": {
        "regressions.html": describe(
            RegressionsDocument,
            regressions="found.found",
            total="found.total",
            pages="found.pages",
            unjudged="found.unjudged",
        )
    },
}

"""Session tables as CSV: sessions, cases, special tables, outputs of a case, comparisons."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hil.compare.stats import STATISTICS
from hil.controller.web.compare import compared, comparing
from hil.controller.web.compare.moves import UNCHANGED
from hil.controller.web.index import sessions
from hil.controller.web.session import sides
from hil.controller.web.session.records import read_detail
from hil.controller.web.session.session_view import view_session
from hil.controller.web.site import get_site
from hil.controller.web.tables import make_plain_rows
from hil.controller.web.templating import format_time
from hil.controller.web.text import csv_answer
from hil.controller.web.text.entries import read_real
from hil.controller.web.text.requests import SESSION, list_fields, number_of, parse_filter
from hil.errors import UsageError

router = APIRouter()
_SESSION = (
    *("id", "root", "kind", "title", "verdict", "created", "finished", "exit_code", "cases", "planned", "failing"),
    *("suite", "flow", "boards", "runtimes", "compilers", "models", "labels", "branch", "commit", "command", "error"),
)
CASE_COLUMNS = (
    *("name", "outcome", "stage", "message", "model", "op", "flow", "runtime", "board", "device_p50_ns", "iterations"),
    *("cold", "grade", "host_s", "compile_s", "program_bytes", "max_abs", "max_ulp", "sqnr_db", "started"),
    "joules",
)
_STATISTICS = tuple(one.key for one in STATISTICS)
_OUTPUT = ("reference", "output", "dtype", "shape", "passed", "mismatches", "elements", *_STATISTICS, "reason")
_POSITION = ("position", "expected", "actual", "kl", "max_abs", "margin", "passed")
_COMPARED = ("table", "case", "baseline", "compared", "verdict", "ratio", "ratio_low", "ratio_high", "note")


@router.get("/sessions.csv")
def sessions_csv(request: Request) -> Response:
    """Return the sessions that match a filter."""
    site, wanted = get_site(request), parse_filter(request, sessions.SessionFilter)

    def read_part(page: int) -> tuple[Sequence[Sequence[Any]], int]:
        with site.reader.open_snapshot() as database:
            found = sessions.list_sessions(database, replace(wanted, page=page), csv_answer.AT_A_TIME)
        return _list_session_rows(found.sessions), found.pages

    return csv_answer.respond_with_pages("sessions", _SESSION, read_part)


def _list_session_rows(found: Sequence[sessions.IndexedSession]) -> Sequence[Sequence[Any]]:
    rows = [{**vars(one), "created": format_time(one.created)} for one in found]
    return [[row[name] for name in _SESSION] for row in rows]


@router.get("/session.csv")
def session_csv(request: Request) -> Response:
    """Return the cases of a session that match a filter."""
    site, wanted = get_site(request), parse_filter(request, sessions.CaseFilter)
    with site.reader.open_snapshot() as database:
        one = sessions.resolve_session(database, request.query_params.get("id", ""), number_of(request, "root"))

    def read_part(page: int) -> tuple[Sequence[Sequence[Any]], int]:
        with site.reader.open_snapshot() as database:
            found = sessions.list_cases(database, one, replace(wanted, page=page), csv_answer.AT_A_TIME)
        rows = [{**dict(row), "cold": bool(row["cold"]), "started": format_time(row["started"])} for row in found.cases]
        return [[row[name] for name in CASE_COLUMNS] for row in rows], found.pages

    return csv_answer.respond_with_pages(one.title, CASE_COLUMNS, read_part)


@router.get("/session/table.csv")
def session_table_csv(request: Request) -> Response:
    """Return the special table of a bisection, study, bench or matrix. Raises UsageError for other kinds."""
    with get_site(request).reader.open_snapshot() as database:
        one = sessions.resolve_session(database, request.query_params.get("id", ""), number_of(request, "root"))
        table = view_session(database, one, csv_answer.MAX_ROWS + 1).table
    if table is None:
        raise UsageError(f"{one.id} only has a table of cases")
    return csv_answer.respond_with_rows(one.title, *make_plain_rows(table))


@router.get("/session/targets.csv")
def targets_csv(request: Request) -> Response:
    """Return the targets of a matrix, one session per row."""
    with get_site(request).reader.open_snapshot() as database:
        one = sessions.resolve_session(database, request.query_params.get("id", ""), number_of(request, "root"))
        found = view_session(database, one).children
    return csv_answer.respond_with_rows(f"targets of {one.title}", _SESSION, _list_session_rows(found))


@router.get("/case.csv")
def case_csv(request: Request) -> Response:
    """Return the comparison of outputs with the decisive reference. ``beside`` selects another reference, from 1."""
    with get_site(request).reader.open_snapshot() as database:
        one = sessions.resolve_session(database, request.query_params.get("id", ""), number_of(request, "root"))
        row = sessions.find_case(database, one, request.query_params.get("case", ""))
    detail, beside = read_detail(one, row), number_of(request, "beside")
    tables = [(detail.against, detail.outputs), *((other.against, other.outputs) for other in detail.others)]
    if beside >= len(tables):
        raise UsageError(f"reference not found for {row['name']}", hint="reload the page")
    against, outputs = tables[beside]
    return csv_answer.respond_with_rows(
        f"outputs of {row['name']}", _OUTPUT, [_make_output_row(against, one) for one in outputs]
    )


@router.get("/case/positions.csv")
def positions_csv(request: Request) -> Response:
    """Return the positions of a case with --generate. Raises UsageError for other cases."""
    with get_site(request).reader.open_snapshot() as database:
        one = sessions.resolve_session(database, request.query_params.get("id", ""), number_of(request, "root"))
        row = sessions.find_case(database, one, request.query_params.get("case", ""))
    generation = read_detail(one, row).generation
    if generation is None:
        raise UsageError(f"{row['name']} has no generation", hint="reload the page")
    rows = [[getattr(position, name) for name in _POSITION] for position in generation.record.positions]
    return csv_answer.respond_with_rows(f"positions of {row['name']}", _POSITION, rows)


def _make_output_row(against: str, one: Mapping[str, Any]) -> tuple[Any, ...]:
    known = (against, one["name"], one["dtype"], "x".join(one["shape"]), one["passed"], one["mismatches"])
    return (*known, one["elements"], *(read_real(one.get(key)) for key in _STATISTICS), one["reason"])


@router.get("/compare.csv")
def compare_csv(request: Request) -> Response:
    """Return all tables of a comparison, or the requested one. Raises UsageError if a side is missing."""
    site, view = get_site(request), parse_filter(request, compared.ComparisonQuery)
    query = request.query_params
    with site.reader.open_snapshot() as database:
        a, b = (
            sides.choose_side(
                database, query.getlist(side), sides.parse_filters(query, side), number_of(request, f"{side}.last", 10)
            )
            for side in ("a", "b")
        )
        if not (a and b):
            raise UsageError(
                "a comparison as CSV requires two sides", hint="choose both sides on the page, then download the CSV"
            )
        found = comparing.compare_sides(database, a, b)
        shows = [view.show] if view.show else [show for show in compared.TITLES if show != UNCHANGED]
        views = (replace(view, show=show, page=1) for show in shows)
        # Request one row more than the limit, so that the response can report the truncation.
        tables = (compared.list_tables(found, one, csv_answer.MAX_ROWS + 1)[0] for one in views)
        rows = list(
            itertools.islice((row for one in tables for row in _iter_comparison_rows(one)), csv_answer.MAX_ROWS + 1)
        )
    return csv_answer.respond_with_rows("comparison", _COMPARED, rows)


def _iter_comparison_rows(table: compared.ComparisonTable) -> Iterable[Sequence[Any]]:
    for mover in table.movers:
        low, high = (
            (mover.comparison.interval.low, mover.comparison.interval.high) if mover.comparison else (None, None)
        )
        both = (mover.before, mover.after)
        yield (table.show, mover.pair.name, *both, mover.verdict, mover.ratio, low, high, mover.why or mover.output)
    for pair in table.pairs:
        yield (table.show, pair.name, pair.before.word, pair.after.word, "", None, None, None, pair.message)


# URL parameters by path.
PARAMETERS = {
    "/sessions.csv": list_fields(sessions.SessionFilter),
    "/session.csv": (*SESSION, *list_fields(sessions.CaseFilter)),
    "/session/table.csv": SESSION,
    "/session/targets.csv": SESSION,
    "/case.csv": (*SESSION, "case", "beside"),
    "/case/positions.csv": (*SESSION, "case"),
    "/compare.csv": (*sides.PARAMETERS, *list_fields(compared.ComparisonQuery)),
}

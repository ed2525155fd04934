"""Serve the page of a tensor or of two compared tensor files: maps, statistics and the worst elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from hil.compare.stats import STATISTICS
from hil.controller.analysis.tensors.elements import PARTS
from hil.controller.analysis.tensors.maps import POOLS
from hil.controller.analysis.tensors.overview import Overview
from hil.controller.analysis.tensors.scales import SCALES
from hil.controller.analysis.tensors.worst import ORDERS, format_exact
from hil.controller.records.pages.analyses import TensorDocument, TensorDtypeDocument
from hil.controller.web.access.heavy import run_heavy
from hil.controller.web.index.sessions import resolve_session
from hil.controller.web.site import get_site
from hil.controller.web.tensors.cells import describe_cell
from hil.controller.web.tensors.drawing.axes import list_layouts
from hil.controller.web.tensors.drawing.charts import HEIGHT, WIDTH, make_histogram, make_scatter_picture
from hil.controller.web.tensors.export import BAR_HEIGHT, BAR_WIDTH, BELOW, LEFT, TYPES, make_map_file, name_map_file
from hil.controller.web.tensors.failing import find_next_failing, find_position
from hil.controller.web.tensors.query import list_tensor_parameters, query_of
from hil.controller.web.tensors.subjects import find_subjects
from hil.controller.web.tensors.tensors import UnknownDtype, find_subject
from hil.controller.web.tensors.view import TEXTS, TensorView
from hil.controller.web.text.documents import describe
from hil.controller.web.text.parameters import InvalidParameter
from hil.controller.web.text.requests import number_of

router = APIRouter()
# Template blocks that a page with large tensors requests separately.
PARTS_OF_PAGE = ("values", "errors", "ulps", "tiles", "numbers", "charts")
_COUNTS = ("elements", "mismatches", "nonfinite", "masked")


@router.get("/tensors")
async def tensors(request: Request) -> Response:
    """Show a tensor, or return a part of the page."""
    return await run_heavy(_render_tensor, request)


def _render_tensor(request: Request) -> Response:
    site, query = get_site(request), query_of(request)
    session, case, subjects = find_subjects(request, query)
    subject = find_subject(subjects, query.kind, query.output, query.beside)
    given: dict[str, Any] = {"session": session, "case": case, "subjects": subjects, "subject": subject, "asked": query}
    part = request.headers.get("hx-target", "")
    now = part if part in PARTS_OF_PAGE else request.query_params.get("now", "")
    position = None
    if session is not None and part not in PARTS_OF_PAGE:
        with site.reader.open_snapshot() as database:
            position = find_position(database, session, case, subjects, subject)
    if getattr(request.state, "saved", False):
        now = "all"  # a saved page cannot request parts later
    try:
        shown = TensorView.of(query, subject, now)
        shown.window, shown.axes  # noqa: B018 - report an invalid slice or layout before drawing anything
    except UnknownDtype as unknown:
        if not unknown.choices:
            raise
        return site.render_page(request, "tensor_dtype.html", unknown=unknown, **given)
    given |= {
        "position": position,
        "shown": shown,
        "parts_of_numbers": PARTS,
        "pools": POOLS,
        "orders": ORDERS,
        "statistics": STATISTICS,
    }
    given |= {
        "histogram": make_histogram,
        "scatter": make_scatter_picture,
        "chart": (WIDTH, HEIGHT),
        "frame": (LEFT, BELOW, BAR_WIDTH, BAR_HEIGHT),
        "scales": {name: text for name, text in SCALES.items() if shown.pair or name not in ("log", "tolerance")},
        "layouts": list_layouts(shown.arrays[0].ndim),
        "file_name": lambda figure, suffix: name_map_file(shown, query.case, figure, suffix),
        "exact": format_exact,
    }
    return site.render_page(request, "tensors.html", texts_shown=TEXTS, **given)


@router.get("/api/tensors/cell")
async def cell(request: Request) -> Response:
    """Return the text for a map cell as JSON."""
    return await run_heavy(_read_cell, request)


def _read_cell(request: Request) -> Response:
    query = query_of(request)
    _, _, subjects = find_subjects(request, query)
    shown = TensorView.of(query, find_subject(subjects, query.kind, query.output, query.beside))
    row, column = number_of(request, "row"), number_of(request, "column")
    found = describe_cell(shown, row, column)
    index = found["index"]
    near = "" if index is None else query.around(shown.plane, index)
    return JSONResponse({**found, "near": f"/tensors?{near}" if near else ""})


@router.get("/tensors/failing")
def failing(request: Request) -> Response:
    """Redirect to the next or previous failing output of the session.

    Raises:
        UsageError: no failing case has stored tensors, or the direction is unknown.
    """
    query, step = query_of(request), request.query_params.get("step", "next")
    if step not in ("next", "previous"):
        raise InvalidParameter.choose("step", step, ("next", "previous"))
    with get_site(request).reader.open_snapshot() as database:
        session = resolve_session(database, query.id, query.root)
        found = find_next_failing(database, session, query.case, query.kind, query.output, forward=step == "next")
    # Other tensors have other axes, so only keep settings that are valid for all tensors.
    kept = {name: getattr(query, name) for name in ("pool", "by", "scale") if getattr(query, name)}
    place = {"case": found.case, "kind": found.kind, "output": found.output}
    return RedirectResponse(f"/tensors?{session.link}&{urlencode(place | kept)}", status_code=303)


@router.get("/tensors/map.svg")
@router.get("/tensors/map.png")
async def map_file(request: Request) -> Response:
    """Return a map of the current view as a file. Raises UsageError if the view has no such map."""
    return await run_heavy(_make_map, request)


def _make_map(request: Request) -> Response:
    query = query_of(request)
    _, _, subjects = find_subjects(request, query)
    shown = TensorView.of(query, find_subject(subjects, query.kind, query.output, query.beside), "all")
    suffix = request.url.path.rpartition(".")[2]
    found = make_map_file(shown, query.case, request.query_params.get("figure", ""), suffix)
    headers = {"content-disposition": f'attachment; filename="{found.name}"'}
    return Response(found.data, media_type=TYPES[suffix], headers=headers)


def _list_later(values: Mapping[str, Any]) -> list[str]:
    shown: TensorView = values["shown"]
    numbers = shown.pair is not None and shown.later("numbers")
    return [*(["numbers"] if numbers else ()), *(["charts"] if not shown.is_text and shown.later("charts") else ())]


def _read_judgement(values: Mapping[str, Any]) -> dict[str, Any] | None:
    shown: TensorView = values["shown"]
    if shown.pair is None or shown.later("numbers"):
        return None
    judged = shown.judgement()
    names = (*_COUNTS, *(one.key for one in STATISTICS))
    found = judged.comparison and {name: getattr(judged.comparison, name) for name in names}
    return {"outcome": judged.outcome and judged.outcome.value, "reason": judged.reason, "statistics": found}


def _read_worst(values: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    shown: TensorView = values["shown"]
    if shown.pair is None or shown.is_text or shown.later("numbers"):
        return None
    names, (a, b) = ("index", "difference", "relative", "ulp", "mismatch"), shown.pair
    return [
        {name: getattr(one, name) for name in names}
        | {"actual": format_exact(a, one.index), "reference": format_exact(b, one.index)}
        for one in shown.worst()
    ]


def _read_charts(values: Mapping[str, Any]) -> Overview | None:
    shown: TensorView = values["shown"]
    return None if shown.is_text or shown.later("charts") else shown.charts()


# URL parameters by path.
PARAMETERS = {
    "/tensors/failing": (*list_tensor_parameters(), "step"),
    "/tensors/map.svg": (*list_tensor_parameters(), "figure"),
    "/tensors/map.png": (*list_tensor_parameters(), "figure"),
    "/tensors": (*list_tensor_parameters(), "now"),
    "/api/tensors/cell": (*list_tensor_parameters(), "row", "column"),
}

# JSON documents by path and template.
DOCUMENTS = {
    "/tensors": {
        "tensors.html": describe(
            TensorDocument,
            types="shown.types",
            apart="shown.apart",
            later=_list_later,
            judgement=_read_judgement,
            worst=_read_worst,
            charts=_read_charts,
        ),
        "tensor_dtype.html": describe(TensorDtypeDocument, choices="unknown.choices"),
    },
}

"""A model's graph, colored by recorded values of nodes, optionally side by side with a second graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from hil.controller.analysis.graphs.colours import ColourScale
from hil.controller.analysis.graphs.node_data import make_node_data
from hil.controller.analysis.graphs.values import METRICS, NodeValue
from hil.controller.records.pages.analyses import GraphDocument
from hil.controller.web.graph.graphs import KINDS, WAYS, GraphChoice, GraphSide, list_models, list_same_model
from hil.controller.web.graph.panes import (
    OpenScopes,
    find_first_failing,
    find_named_scope,
    format_metric,
    is_failing,
    list_scopes,
    make_pane_data,
    summarize_scope,
)
from hil.controller.web.graph.sides import read_side
from hil.controller.web.index.sessions import resolve_session
from hil.controller.web.site import WebSite, get_site
from hil.controller.web.text.addresses import PageQuery, choose_page
from hil.controller.web.text.csv_answer import MAX_ROWS, respond_with_rows
from hil.controller.web.text.documents import describe
from hil.controller.web.text.parameters import InvalidParameter
from hil.controller.web.text.requests import count_rows, is_saved, list_fields, parse_filter

router = APIRouter()
PAGE_ROWS = 100
NAMES = {
    "tolerance_ratio": "error ÷ tolerance",
    "max_abs": "max abs error",
    "sqnr_db": "SQNR",
    "outcome": "outcome",
    "time_ns": "time",
    "placement": "placement",
}


@dataclass(frozen=True)
class GraphQuery(PageQuery):
    """Query parameters of a graph page."""

    id: str = ""
    root: int = 0
    case: str = ""
    of: str = "onnx"  # a key of KINDS
    by: str = ""  # a metric from METRICS; "" is the first with values
    way: str = "isolated"
    open: str = ""  # open name scopes, see OpenScopes
    id2: str = ""  # "ROOT:ID" of the second session; "" is the same session if ``of2`` is set
    of2: str = ""
    node: str = ""
    q: str = ""
    order: str = ""  # "" is worst first, "place" is graph order, or "name"
    page: int = 1


@dataclass(frozen=True)
class GraphView:
    """Data of a graph page."""

    asked: GraphQuery
    sides: Sequence[GraphSide]
    metrics: Sequence[str]  # metrics with values
    scale: ColourScale
    choices: Sequence[GraphChoice]  # sessions with the same model
    models: Sequence[GraphChoice]  # models in the session
    scopes: OpenScopes
    focus: str  # the chosen node, or the first failing node; "" without either


@dataclass(frozen=True)
class NodeTablePage:
    """Page of the node table."""

    rows: Sequence[Mapping[str, Any]]
    total: int
    pages: int


@router.get("/graph")
def graph(request: Request) -> Response:
    """Show the graph, the node table, and details of the chosen node."""
    site = get_site(request)
    view = read_view(site, parse_filter(request, GraphQuery))
    return site.render_page(
        request,
        "graph.html",
        view=view,
        asked=view.asked,
        sides=view.sides,
        main_side=view.sides[0],
        found=make_node_table(view, count_rows(request, PAGE_ROWS)),
        chosen=[describe_chosen(view, side) for side in view.sides] if view.focus else [],
        groups=[] if is_saved(request) else list_scopes(view.sides, PAGE_ROWS),
        format_metric=format_metric,
        names=NAMES,
        kinds=KINDS,
        ways=WAYS,
    )


@router.get("/api/graph")
def data(request: Request) -> Response:
    """Return the data for the page's script."""
    return JSONResponse(make_document(read_view(get_site(request), parse_filter(request, GraphQuery))))


@router.get("/graph/node-data")
def download(request: Request) -> Response:
    """Download node values as a file for Model Explorer."""
    view = read_view(get_site(request), parse_filter(request, GraphQuery))
    side = view.sides[0]
    found = make_node_data(side.values, view.scale.metric, side.graph)
    headers = {"content-disposition": f'attachment; filename="node-data-{view.scale.metric}.json"'}
    return JSONResponse(found, headers=headers)


_COLUMNS = (
    "node",
    "operator",
    "outcome",
    "tolerance_ratio",
    "max_abs",
    "sqnr_db",
    "time_ns",
    "placement",
    "case",
    "reason",
    "beside",
)
_SCOPE_COLUMNS = ("scope", "nodes", "failing", "tolerance_ratio", "max_abs")


@router.get("/graph.csv")
def graph_csv(request: Request) -> Response:
    """Return the whole node table as CSV."""
    view = read_view(get_site(request), replace(parse_filter(request, GraphQuery), page=1))
    rows = []
    for row in make_node_table(view, MAX_ROWS + 1).rows:
        node, value = row["node"], row["value"]
        known = (value.outcome, value.tolerance_ratio, value.max_abs, value.sqnr_db, value.time_ns, value.placement)
        rows.append((node.name, node.op, *known, value.case, value.reason, row["beside"]))
    return respond_with_rows(f"nodes of {view.sides[0].model}", _COLUMNS, rows)


@router.get("/graph/scopes.csv")
def scopes_csv(request: Request) -> Response:
    """Return the name scopes of the graph as CSV."""
    view = read_view(get_site(request), parse_filter(request, GraphQuery))
    rows = []
    for one in list_scopes(view.sides, MAX_ROWS + 1):
        worst = [value.get_metric(name) if (value := one.worst.get(name)) else None for name in _SCOPE_COLUMNS[3:]]
        rows.append((one.scope.path, len(one.scope.members), one.failing, *worst))
    return respond_with_rows(f"scopes of {view.sides[0].model}", _SCOPE_COLUMNS, rows)


def read_view(site: WebSite, wanted: GraphQuery) -> GraphView:
    """Read the data for a query. Raises UsageError if the session, graph or metric does not exist."""
    if wanted.by and wanted.by not in METRICS:
        raise InvalidParameter.choose("node colouring", wanted.by, METRICS)
    with site.reader.open_snapshot() as database:
        session = resolve_session(database, wanted.id, wanted.root)
        sides = [read_side(database, site, session, wanted.of, wanted.way, case=wanted.case)]
        model = sides[0].model
        if wanted.id2:
            root, _, name = wanted.id2.partition(":")
            if not (root.isdecimal() and len(root) < 10):
                raise InvalidParameter(f"invalid session reference {wanted.id2[:80]!r}", hint="expected ROOT:ID")
            other = resolve_session(database, name, int(root))
            sides.append(read_side(database, site, other, wanted.of2 or wanted.of, wanted.way, model=model))
        elif wanted.of2:
            sides.append(read_side(database, site, session, wanted.of2, wanted.way, case=wanted.case))
        choices = list_same_model(database, session, model)
        models = list_models(database, session)
    values = [value for side in sides for value in side.values.values()]
    metrics = [one for one in METRICS if any(value.get_metric(one) is not None for value in values)]
    by = wanted.by or next(iter(metrics), "outcome")
    focus = wanted.node or find_first_failing(sides[0])
    shown = [""] * len(sides)
    # Scopes that the user closed stay closed, unless a node is chosen.
    if wanted.node or not wanted.open:
        shown = [focus, *(find_matching_node(focus, sides[0], side) or focus for side in sides[1:])]
    scopes = OpenScopes(sides, wanted.open, shown)
    return GraphView(wanted, sides, metrics, ColourScale.of(by, values), choices, models, scopes, focus)


def make_document(view: GraphView) -> dict[str, Any]:
    """Return the data for the script: names, positions, edges and colors of nodes.

    The data also contains the names that link nodes of both sides.
    """
    return {"panes": [make_pane_data(side, view.scale, view.scopes) for side in view.sides]}


def make_node_table(view: GraphView, rows: int) -> NodeTablePage:
    """Return the requested page of the node table. Raises UsageError for an unknown order."""
    wanted, side = view.asked, view.sides[0]
    found = list(range(len(side.graph.nodes)))
    for word in wanted.q.lower().split():
        found = [
            place
            for place in found
            if word in side.graph.nodes[place].name.lower() or word in side.graph.nodes[place].op.lower()
        ]
    if wanted.order == "name":
        found.sort(key=lambda place: side.graph.nodes[place].name)
    elif wanted.order == "":
        found.sort(key=lambda place: _sort_key(view, side, place), reverse=True)
    elif wanted.order != "place":
        raise InvalidParameter.choose("node order", wanted.order, ("place", "name"))
    first, pages = choose_page(wanted.page, len(found), rows)
    return NodeTablePage([_make_node_row(view, place) for place in found[first : first + rows]], len(found), pages)


def _sort_key(view: GraphView, side: GraphSide, place: int) -> tuple[bool, float]:
    value = side.values.get(side.graph.nodes[place].name)
    found = value.get_metric(view.scale.metric) if value is not None else None
    if value is None or found is None:
        return False, -math.inf
    if isinstance(found, str):
        return is_failing(value), value.max_abs or 0.0
    return is_failing(value) and view.scale.metric != "time_ns", -found if view.scale.metric == "sqnr_db" else found


def _make_node_row(view: GraphView, place: int) -> dict[str, Any]:
    side = view.sides[0]
    node = side.graph.nodes[place]
    value = side.values.get(node.name, NodeValue())
    others = [
        other.values.get(found)
        for other in view.sides[1:]
        if (found := find_matching_node(node.name, side, other)) is not None
    ]
    return {
        "node": node,
        "value": value,
        "colour": view.scale.choose_colour(value),
        "other": format_metric(view.scale.metric, others[0]) if others else "",
        "beside": others[0].get_metric(view.scale.metric) if others and others[0] is not None else None,
    }


def find_matching_node(name: str, side: GraphSide, other: GraphSide) -> str | None:
    """Return the node of another graph that is the same as this node or contains it, or None."""
    if name in other.places:
        return name
    place = side.places.get(name)
    wanted = {name, *(side.graph.nodes[place].within if place is not None else ())}
    return next((node.name for node in other.graph.nodes if not wanted.isdisjoint((node.name, *node.within))), None)


def describe_chosen(view: GraphView, side: GraphSide) -> dict[str, Any]:
    """Return the details of the chosen node on a side."""
    if (scope := find_named_scope(side, view.focus)) is not None:
        return {"side": side, "node": None, "group": summarize_scope(side, scope)}
    name = find_matching_node(view.focus, view.sides[0], side)
    if name is None:
        return {"side": side, "node": None, "group": None}
    node = side.graph.nodes[side.places[name]]
    value = side.values.get(name, NodeValue())
    compared = [tensor for tensor in (*node.outputs, *node.inputs) if tensor in value.outputs]
    return {
        "side": side,
        "node": node,
        "value": value,
        "colour": view.scale.choose_colour(value),
        "tensors": [(tensor, side.graph.shapes.get(tensor, "")) for tensor in node.inputs],
        "made": [(tensor, side.graph.shapes.get(tensor, "")) for tensor in node.outputs],
        "compared": compared or list(value.outputs),
    }


def _list_sources(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = ("title", "kind", "model", "notes")
    return [{**{name: getattr(one, name) for name in names}, "nodes": len(one.graph.nodes)} for one in values["sides"]]


def _list_nodes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = (
        "outcome",
        "reason",
        "tolerance_ratio",
        "is_ratio_bound",
        "max_abs",
        "sqnr_db",
        "time_ns",
        "placement",
        "case",
    )
    return [
        {"name": row["node"].name, "op": row["node"].op, "case": row["value"].case, "other": row["other"]}
        | {name: getattr(row["value"], name) for name in names}
        for row in values["found"].rows
    ]


# URL parameters by path.
PARAMETERS = {
    "/graph": list_fields(GraphQuery),
    "/graph.csv": list_fields(GraphQuery),
    "/graph/scopes.csv": list_fields(GraphQuery),
    "/graph/node-data": (*list_fields(GraphQuery), "by"),
    "/api/graph": list_fields(GraphQuery),
}

# JSON documents by path and template.
DOCUMENTS = {
    "/graph": {
        "graph.html": describe(
            GraphDocument,
            metric="view.scale.metric",
            metrics="view.metrics",
            sides=_list_sources,
            nodes=_list_nodes,
            total="found.total",
            pages="found.pages",
        )
    },
}

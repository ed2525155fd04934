"""Reject unknown URL parameters, because a misspelled filter would otherwise show all rows."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import fields

from fastapi import HTTPException, Request

from hil.controller.web.compare.compared import ComparisonQuery
from hil.controller.web.history.regressions import RegressionFilter
from hil.controller.web.index.series import HistoryFilter
from hil.controller.web.index.sessions import CaseFilter, SessionFilter
from hil.controller.web.pages.gates import GateFilter
from hil.controller.web.pages.graph import GraphQuery
from hil.controller.web.pages.home.home import HomeFilter
from hil.controller.web.pages.home.triage import TriageFilter
from hil.controller.web.pages.series import SeriesFilter
from hil.controller.web.pages.traces.operations import TableQuery
from hil.controller.web.session.sides import FILTERS
from hil.controller.web.tensors.query import TensorQuery
from hil.controller.web.text.names import escape_name
from hil.errors import did_you_mean

_SESSION = ("id", "root")
_CASE = (*_SESSION, "case")
_SIDES = ("a", "b", "a.last", "b.last", *(f"{side}.{name}" for side in "ab" for name in FILTERS))
_PROFILES = ("profile", "a", "b")
_INDEX = re.compile(r"i\d{1,3}")


def _list_fields(kind: type) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind))


_TENSOR = tuple(name for name in _list_fields(TensorQuery) if name != "index")
# Path -> names of its URL parameters. Paths that are not listed have none.
PARAMETERS: Mapping[str, Collection[str]] = {
    "/": _list_fields(HomeFilter),
    "/cause": ("since", "key"),
    "/changes.csv": ("since", "key"),
    "/triage": _list_fields(TriageFilter),
    "/triage.csv": _list_fields(TriageFilter),
    "/sessions.csv": _list_fields(SessionFilter),
    "/session": (*_SESSION, *_list_fields(CaseFilter)),
    "/session.csv": (*_SESSION, *_list_fields(CaseFilter)),
    "/session/table.csv": _SESSION,
    "/session/targets.csv": _SESSION,
    "/case": _CASE,
    "/case.csv": (*_CASE, "beside"),
    "/case/positions.csv": _CASE,
    "/log": (*_SESSION, "file", "whole"),
    "/file": (*_SESSION, "file", "whole"),
    "/compare": (*_SIDES, "s", *_list_fields(ComparisonQuery)),
    "/compare.csv": (*_SIDES, *_list_fields(ComparisonQuery)),
    "/history": (*_list_fields(HistoryFilter), "q"),
    "/history.csv": _list_fields(HistoryFilter),
    "/history/regressions": _list_fields(RegressionFilter),
    "/history/regressions.csv": _list_fields(RegressionFilter),
    "/series": _list_fields(SeriesFilter),
    "/series.csv": _list_fields(SeriesFilter),
    "/gates": _list_fields(GateFilter),
    "/graph": _list_fields(GraphQuery),
    "/graph.csv": _list_fields(GraphQuery),
    "/graph/node-data": (*_list_fields(GraphQuery), "by"),
    "/api/graph": _list_fields(GraphQuery),
    "/api/there": (*_SESSION, "s"),
    "/tensors": (*_TENSOR, "now"),
    "/tensors.csv": (*_TENSOR, "table"),
    "/api/tensors/cell": (*_TENSOR, "row", "column"),
    "/traces": (),
    "/trace": (*_CASE, "kind", *_PROFILES, *_list_fields(TableQuery)),
    "/trace.csv": (*_PROFILES, *_list_fields(TableQuery)),
    "/trace/compilation.csv": ("profile", "table"),
    "/perfetto/trace": _PROFILES,
    "/share": ("page",),
    "/boards": ("hours", "select"),
    "/boards.csv": ("select",),
    "/boards/use.csv": ("hours", "select"),
    "/board": ("name", "hours"),
    "/board/use.csv": ("name", "hours"),
    "/board/leases.csv": ("name",),
    "/events.csv": ("board", "job"),
    "/queue": ("hours", "limit", "page"),
    "/queue/waits.csv": ("hours",),
    "/jobs.csv": ("state",),
    "/job": ("name",),
    "/job/log": ("name",),
    "/job/log.txt": ("name",),
    "/job/jobs.csv": ("name",),
    "/job/leases.csv": ("name",),
    "/job/cases.csv": ("name",),
}
# Perfetto's pages choose their own parameters. `hil publish` may be newer than the server.
_OPEN = re.compile(r"/perfetto/(ui/.*)?|/publish/.*")
_TENSOR_PATHS = ("/tensors", "/tensors.csv", "/api/tensors/cell")


async def check_parameters(request: Request) -> None:
    """Raise HTTPException with status 400 for a URL parameter that the page does not have."""
    path = request.url.path
    if not request.url.query or _OPEN.fullmatch(path):
        return
    known = PARAMETERS.get(path, ())
    for name in request.query_params:
        if name in known or (path in _TENSOR_PATHS and _INDEX.fullmatch(name)):
            continue
        hint = did_you_mean(name, known) if len(name) < 80 else ""
        names = f"parameters: {', '.join(known)}" if known else "this page has no parameters"
        raise HTTPException(400, f"unknown URL parameter '{escape_name(name[:80])}'; {hint}{names}")

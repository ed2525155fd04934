"""Reject unknown URL parameters, because a misspelled filter would otherwise show all rows."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from types import ModuleType

from fastapi import HTTPException, Request

from hil.controller.web.text.names import escape_name
from hil.controller.web.text.table_views import check_table_view, has_tables, list_view_parameters
from hil.errors import UsageError, did_you_mean

# Perfetto's pages choose their own parameters. `hil publish` may be newer than the server.
_OPEN = re.compile(r"/perfetto/(ui/.*)?|/publish/.*")
_MAX_CHARS, _MAX_NAMES = 80, 40


def collect_parameters(pages: Iterable[ModuleType]) -> dict[str, Collection[str]]:
    """Return path -> names of URL parameters, from ``PARAMETERS`` of pages. Other paths have no parameters."""
    found: dict[str, Collection[str]] = {}
    for page in pages:
        found |= getattr(page, "PARAMETERS", {})
    return found


async def check_parameters(request: Request) -> None:
    """Raise HTTPException with status 400 for a URL parameter that the page does not have."""
    if not request.url.query or _OPEN.fullmatch(request.url.path):
        return
    parameters: Mapping[str, Collection[str]] = request.app.state.parameters
    known = parameters.get(request.url.path, ())
    if has_tables(request.url.path):
        view = list_view_parameters(known)
        known = (*known, *view)
        _check_view(request, view)
    for name in request.query_params:
        if name not in known:
            hint = did_you_mean(name, known) if len(name) < _MAX_CHARS else ""
            names = f"parameters: {', '.join([*known][:_MAX_NAMES])}" if known else "this page has no parameters"
            raise HTTPException(400, f"unknown URL parameter '{escape_name(name[:_MAX_CHARS])}'; {hint}{names}")


def _check_view(request: Request, names: Collection[str]) -> None:
    try:
        check_table_view(request.query_params.multi_items(), names)
    except UsageError as error:
        raise HTTPException(400, f"{error.message}; {error.hint}") from error

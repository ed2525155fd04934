"""Reject unknown URL parameters, because a misspelled filter would otherwise show all rows."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from types import ModuleType

from fastapi import Request

from hil.controller.web.text.documents import DocumentRecipe
from hil.controller.web.text.names import escape_name
from hil.controller.web.text.parameters import InvalidParameter
from hil.controller.web.text.table_views import check_table_view, has_tables, list_view_parameters
from hil.errors import did_you_mean

# Perfetto's pages choose their own parameters. `hil publish` may be newer than the server.
_OPEN = re.compile(r"/perfetto/(ui/.*)?|/publish/.*")
_MAX_CHARS, _MAX_NAMES = 80, 40


def collect_parameters(pages: Iterable[ModuleType]) -> dict[str, Collection[str]]:
    """Return path -> names of URL parameters, from ``PARAMETERS`` of pages. Other paths have no parameters."""
    found: dict[str, Collection[str]] = {}
    for page in pages:
        found |= getattr(page, "PARAMETERS", {})
    return found


def collect_documents(pages: Iterable[ModuleType]) -> dict[str, Mapping[str, DocumentRecipe]]:
    """Return path -> template -> document, from ``DOCUMENTS`` of pages."""
    found: dict[str, Mapping[str, DocumentRecipe]] = {}
    for page in pages:
        found |= getattr(page, "DOCUMENTS", {})
    return found


async def check_parameters(request: Request) -> None:
    """Raise InvalidParameter for a URL parameter that the page does not have."""
    if not request.url.query or _OPEN.fullmatch(request.url.path):
        return
    parameters: Mapping[str, Collection[str]] = request.app.state.parameters
    path = request.url.path
    known = parameters.get(path, ())
    if has_tables(path):
        view = list_view_parameters(known)
        known = (*known, *view)
        check_table_view(request.query_params.multi_items(), view)
    for name in request.query_params:
        if name not in known:
            close = did_you_mean(name, known) if len(name) < _MAX_CHARS else ""
            names = f"parameters: {', '.join([*known][:_MAX_NAMES])}" if known else "this page has no parameters"
            text = f"unknown URL parameter '{escape_name(name[:_MAX_CHARS])}'"
            raise InvalidParameter(text, hint=f"{close}{names}")

"""State that all pages share (index, directories, templates), and helpers for requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment

from hil.controller.web.farm.link import FarmLink
from hil.controller.web.index.index import IndexReader
from hil.controller.web.index.indexer import IndexProgress
from hil.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

F = TypeVar("F", bound="DataclassInstance")

# Maximum table rows in a saved page.
SAVED_ROWS = 5000
# Links in the header of all pages, in order.
NAVIGATION = (("/", "Sessions"), ("/compare", "Compare"), ("/history", "History"), ("/traces", "Traces"))
# Additional links for a server with a farm.
FARM_NAVIGATION = (("/boards", "Boards"), ("/queue", "Queue"))


@dataclass(frozen=True)
class WebSite:
    """Shared state of the server. Use :func:`site_of` to get it for a request."""

    roots: Sequence[Path]
    reader: IndexReader
    progress: IndexProgress
    templates: Environment
    farm: FarmLink | None = None

    def page(self, request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
        """Render a template. An htmx request with ``HX-Target`` gets only that block."""
        part = request.headers.get("hx-target", "")
        common: dict[str, Any] = {"path": request.url.path, "query": str(request.url.query), "navigation": NAVIGATION}
        common["navigation"] += FARM_NAVIGATION if self.farm else ()
        saved = is_saved(request)
        common |= {"progress": self.progress, "saved": saved, "now": time.time()}
        if saved:
            common["parts"] = self.templates.get_template("parts.html").make_module({"saved": True})
        common["may_change"] = getattr(request.state, "may_change", False) and not saved
        found = self.templates.get_template(template)
        if part in found.blocks:
            context = found.new_context({**common, **values})
            return HTMLResponse("".join(found.blocks[part](context)), status)
        return HTMLResponse(found.render(**common, **values), status)


def is_saved(request: Request) -> bool:
    """Return True for a page to save as a file (`pages/share.py`). A saved page cannot use the server."""
    return getattr(request.state, "saved", False) is True


def rows_of(request: Request, usual: int) -> int:
    """Return the number of table rows: ``usual``, or :data:`SAVED_ROWS` in a saved page, which has no further pages."""
    return SAVED_ROWS if is_saved(request) else usual


def site_of(request: Request) -> WebSite:
    """Return the site of a request."""
    site: WebSite = request.app.state.site
    return site


def asked(request: Request, kind: type[F]) -> F:
    """Parse a filter from the query. Raises UsageError for an invalid number."""
    values: dict[str, Any] = {}
    for field in fields(kind):
        given = request.query_params.get(field.name, "")
        if field.type in ("int", int):
            if given and not (given.isdecimal() and len(given) < 10):
                raise UsageError(f"{field.name} must be a number, got {given[:40]!r}")
            if given:
                values[field.name] = int(given)
        elif given:
            values[field.name] = given
    return kind(**values)


def number_of(request: Request, name: str, default: int = 0) -> int:
    """Parse a non-negative integer from the query. Raises UsageError if the value is invalid."""
    given = request.query_params.get(name, "")
    if not given:
        return default
    if not (given.isdecimal() and len(given) < 10):
        raise UsageError(f"{name} must be a number, got {given[:40]!r}")
    return int(given)

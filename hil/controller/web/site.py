"""What every page has at hand: the index, the folders, the templates, who asks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment

from hil.controller.web.farm_link import FarmLink
from hil.controller.web.index import Reader
from hil.controller.web.indexer import Progress
from hil.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

F = TypeVar("F", bound="DataclassInstance")

# So many rows of a table are in a saved page.
SAVED_ROWS = 5000
# The pages that the head of every page links to, in order.
NAVIGATION = (("/", "Sessions"), ("/compare", "Compare"), ("/history", "History"), ("/traces", "Traces"))
# Where a farm is, these too.
FARM_NAVIGATION = (("/boards", "Boards"), ("/queue", "Queue"))


@dataclass(frozen=True)
class Site:
    """The server's own things; a request finds them with :func:`site_of`."""

    roots: Sequence[Path]
    reader: Reader
    progress: Progress
    templates: Environment
    farm: FarmLink | None = None

    def page(self, request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
        """A template's page. A request of htmx for a part of it (``HX-Target``) gets that block alone."""
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
    """Whether the page is made to be kept as a file (`pages/share.py`): nothing in it can ask the server."""
    return getattr(request.state, "saved", False) is True


def rows_of(request: Request, usual: int) -> int:
    """How many rows of a table a page has: the ``usual`` ones, and in a saved page, which has no next one, many."""
    return SAVED_ROWS if is_saved(request) else usual


def site_of(request: Request) -> Site:
    """The site that a request came to."""
    site: Site = request.app.state.site
    return site


def asked(request: Request, kind: type[F]) -> F:
    """A filter from an address's query. Raises UsageError: a number is none."""
    values: dict[str, Any] = {}
    for field in fields(kind):
        given = request.query_params.get(field.name, "")
        if field.type in ("int", int):
            if given and not (given.isdecimal() and len(given) < 10):
                raise UsageError(f"{field.name} {given[:40]!r} is no number")
            if given:
                values[field.name] = int(given)
        elif given:
            values[field.name] = given
    return kind(**values)


def number_of(request: Request, name: str, default: int = 0) -> int:
    """A whole number of an address's query. Raises UsageError: it is none."""
    given = request.query_params.get(name, "")
    if not given:
        return default
    if not (given.isdecimal() and len(given) < 10):
        raise UsageError(f"{name} {given[:40]!r} is no number")
    return int(given)

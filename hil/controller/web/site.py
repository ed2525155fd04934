"""State that all pages share: index, directories and templates."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment

from hil.controller.storage.history.place import HistoryPlace
from hil.controller.web.farm.link import FarmLink
from hil.controller.web.index.index import IndexReader
from hil.controller.web.index.memo import IndexMemo
from hil.controller.web.index.progress import IndexProgress
from hil.controller.web.readers.triage import TriageReader
from hil.controller.web.text.documents import is_json, respond_with_document
from hil.controller.web.text.requests import is_saved
from hil.controller.web.text.roots import number_roots
from hil.controller.web.text.table_views import format_table_view, list_view_parameters

# Links in the header of all pages, in order.
NAVIGATION = (
    ("/", "Home"),
    ("/triage", "Triage"),
    ("/compare", "Compare"),
    ("/history", "History"),
    ("/traces", "Traces"),
)
# Additional links, if the server has a history, a stored gate, or a farm.
SERIES_NAVIGATION = (("/series", "Series"),)
GATE_NAVIGATION = (("/gates", "Gates"),)
FARM_NAVIGATION = (("/boards", "Boards"), ("/queue", "Queue"))


@dataclass(frozen=True)
class WebSite:
    """Shared state of the server. Use :func:`get_site` to get it for a request."""

    roots: Sequence[Path]
    reader: IndexReader
    progress: IndexProgress
    templates: Environment
    triage: TriageReader
    farm: FarmLink | None = None
    history: HistoryPlace | None = None  # place of the history, which may not exist yet

    started: float = field(default_factory=time.monotonic)

    @cached_property
    def numbered(self) -> Mapping[int, Path]:
        """Runs directories by their numbers in URLs."""
        return number_roots(self.roots)

    @cached_property
    def memo(self) -> IndexMemo:
        """Cache of values that pages compute from the whole index."""
        return IndexMemo(self.reader, self.progress)

    @property
    def has_history(self) -> bool:
        """Whether the history may exist."""
        return self.history is not None and self.history.may_exist()

    def render_page(self, request: Request, template: str, *, status: int = 200, **values: Any) -> Response:
        """Render a template. An htmx request with ``HX-Target`` gets only that block.

        A request of the JSON API gets the document that the page's module describes in ``DOCUMENTS``.
        """
        if is_json(request):
            recipe = request.app.state.documents[request.url.path][template]
            return respond_with_document(recipe.make(values), status)
        part = request.headers.get("hx-target", "")
        common: dict[str, Any] = {"path": request.url.path, "query": str(request.url.query), "navigation": NAVIGATION}
        common["navigation"] += SERIES_NAVIGATION if self.has_history else ()
        common["navigation"] += GATE_NAVIGATION if self.reader.has_kind("gate") else ()
        common["navigation"] += FARM_NAVIGATION if self.farm else ()
        saved = is_saved(request)
        common |= {"progress": self.progress, "saved": saved, "now": time.time()}
        view_names = list_view_parameters(request.app.state.parameters.get(request.url.path, ()))
        common |= {"columns_parameter": view_names[0], "table_view": format_table_view(request, view_names)}
        if saved:
            common["parts"] = self.templates.get_template("parts.html").make_module({"saved": True})
        common["may_change"] = getattr(request.state, "may_change", False) and not saved
        found = self.templates.get_template(template)
        if part in found.blocks:
            context = found.new_context({**common, **values})
            return HTMLResponse("".join(found.blocks[part](context)), status)
        return HTMLResponse(found.render(**common, **values), status)


def get_site(request: Request) -> WebSite:
    """Return the site of a request."""
    site: WebSite = request.app.state.site
    return site

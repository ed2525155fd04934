"""Create the FastAPI application: pages, their shared state, and error pages."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from hil.controller.storage.history.place import HistoryPlace
from hil.controller.web.access.security import HEADERS, AccessRules, RequestGuard
from hil.controller.web.access.sharing import FairShare
from hil.controller.web.farm.link import FarmLink
from hil.controller.web.index.index import IndexReader
from hil.controller.web.index.progress import IndexProgress
from hil.controller.web.pages import compare, consoles, events, files, graph, publish, sessions, share, tensors
from hil.controller.web.pages.csv import csv_farm, csv_tables, csv_tensors
from hil.controller.web.pages.farm import board_console, boards, farm_events, queue
from hil.controller.web.pages.home import home, search, triage
from hil.controller.web.pages.traces import perfetto, traces
from hil.controller.web.pages.trends import gates, history, series
from hil.controller.web.publish.published import PUBLISHED, PublishedStore
from hil.controller.web.readers.triage import TriageReader
from hil.controller.web.server.first_index import wait_for_index
from hil.controller.web.server.json_api import OPENAPI, JsonErrors, JsonPages, is_of_api
from hil.controller.web.server.openapi import describe_api
from hil.controller.web.server.url_parameters import check_parameters, collect_documents, collect_parameters
from hil.controller.web.site import WebSite, get_site
from hil.controller.web.templating import make_environment
from hil.controller.web.text.documents import is_json, respond_with_error
from hil.controller.web.text.parameters import InvalidParameter
from hil.controller.workloads.triage.triage_file import NAME as TRIAGE_FILE
from hil.errors import AccessRefused, FarmUnreachable, HilError, StorageError

PAGES = (
    home,
    search,
    triage,
    sessions,
    compare,
    history,
    series,
    gates,
    files,
    consoles,
    events,
    share,
    board_console,
    boards,
    queue,
    farm_events,
    graph,
    traces,
    perfetto,
    publish,
    tensors,
    csv_tables,
    csv_tensors,
    csv_farm,
)
_RETRY_SECONDS = 2  # seconds to wait for the first index
_STATUS = {AccessRefused: 403, FarmUnreachable: 503, StorageError: 507, InvalidParameter: 400}


def create_app(
    roots: Sequence[Path],
    index: Path,
    progress: IndexProgress,
    access: AccessRules,
    farm: FarmLink | None = None,
    published: PublishedStore | None = None,
    history_place: HistoryPlace | None = None,
    triage_file: Path | None = None,
) -> FastAPI:
    """Create the application for runs directories and their index. A separate process updates the index.

    Args:
        published: store for sessions sent by `hil publish`. Default: the ``published`` directory in the first root.
        history_place: place of the history, which may not exist yet; None shows no series.
        triage_file: triage of failures. Default: ``hil-triage.json`` in the first root.
    """
    app = FastAPI(title="hil", docs_url=None, redoc_url=None, openapi_url=None)
    triaged = TriageReader(triage_file or roots[0] / TRIAGE_FILE)
    app.state.site = WebSite(roots, IndexReader(index), progress, make_environment(), triaged, farm, history_place)
    app.state.published = published or PublishedStore(roots[0] / PUBLISHED)
    app.state.saving = asyncio.Semaphore(share.AT_A_TIME)
    app.state.streams = {}  # event streams of :mod:`.live`, oldest first
    app.state.publishing = asyncio.Semaphore(publish.AT_A_TIME)
    app.state.parameters = collect_parameters(PAGES)
    app.state.documents = collect_documents(PAGES)
    checks = [Depends(check_parameters), Depends(wait_for_index)]
    for page in PAGES:
        app.include_router(page.router, dependencies=checks)
    app.add_api_route(OPENAPI, _send_description, include_in_schema=False)
    static = str(resources.files("hil.controller.web").joinpath("static"))
    app.mount("/static", StaticFiles(directory=static), "static")
    app.add_exception_handler(HilError, _handle_hil_error)
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_exception_handler(RequestValidationError, _handle_invalid_query)
    app.add_exception_handler(sqlite3.Error, _handle_index_error)
    for unreadable in (OSError, UnicodeError, RecursionError):
        app.add_exception_handler(unreadable, _handle_read_error)
    app.add_exception_handler(Exception, _handle_internal_error)
    app.add_middleware(FairShare)
    app.add_middleware(JsonPages, pages=tuple(app.state.documents))
    app.add_middleware(RequestGuard, access=access)
    app.add_middleware(JsonErrors)
    return app


def _send_description(request: Request) -> Response:
    """Return the OpenAPI description of the JSON API."""
    return JSONResponse(describe_api(request.app.state.documents, request.app.state.parameters))


def _handle_hil_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HilError)
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 404)
    # A change is wrong, whether the index is complete or not.
    if status == 404 and request.method in ("GET", "HEAD") and not get_site(request).progress.first_done:
        hint = "hil still reads the stored sessions: reload in a moment"
        response = _render_error(request, 503, error.message, hint, type(error).__name__)
        response.headers["retry-after"] = str(_RETRY_SECONDS)
        return response
    return _render_error(request, status, error.message, error.hint, type(error).__name__)


def _handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _render_error(request, error.status_code, str(error.detail), "")


def _handle_invalid_query(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    names = ", ".join(str(one["loc"][-1]) for one in error.errors()[:5])
    return _render_error(request, 400, f"invalid URL parameters: {names}", "")


def _handle_index_error(request: Request, error: Exception) -> Response:
    """Handle index errors: an invalid query, or a deleted or damaged index."""
    return _render_error(
        request,
        400,
        f"index query failed: {error}",
        "narrow the query, or retry in a moment: hil rebuilds a missing index",
    )


def _handle_read_error(request: Request, error: Exception) -> Response:
    """Handle read errors: an invalid file name in a record, a deleted file, or missing permissions."""
    why = (
        error.strerror
        if isinstance(error, OSError) and error.strerror
        else "invalid text, or nesting exceeds the limit"
    )
    return _render_error(request, 404, f"cannot read a file named in the record: {why}", "")


def _handle_internal_error(request: Request, error: Exception) -> Response:
    """Handle unexpected errors. The page shows no details. The traceback is on the server's stderr."""
    response = _render_error(request, 500, "internal error in hil web", "see the traceback in the server's terminal")
    response.headers.update(HEADERS)
    return response


def _render_error(request: Request, status: int, message: str, hint: str, kind: str = "HTTPError") -> Response:
    # An internal error is handled before the request of the API becomes a request for the page.
    if is_json(request) or is_of_api(request.scope):
        return respond_with_error(status, kind, message, hint)
    # API requests get plain text instead of HTML.
    if request.headers.get("accept", "").startswith("application/json") and "/api/" in request.url.path:
        return PlainTextResponse(f"{message}; {hint}" if hint else message, status)
    return get_site(request).render_page(request, "error.html", status=status, message=message, hint=hint)

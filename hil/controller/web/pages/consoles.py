"""Console lines of a session's boards, with a search."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hil.controller.records.pages.sessions import ConsolePageDocument
from hil.controller.web.files.consoles import ShownLine, list_consoles, make_console_rows, read_console
from hil.controller.web.index import sessions
from hil.controller.web.site import get_site
from hil.controller.web.text import csv_answer
from hil.controller.web.text.documents import describe
from hil.controller.web.text.names import escape_name, unescape_name
from hil.controller.web.text.requests import SESSION, count_rows, number_of
from hil.errors import UsageError

router = APIRouter()
# Maximum lines on a page. A page with more shows the last lines, which are nearest to a failure.
_LINES = 2000
_COLUMNS = ("line", "time_s", "host_ns", "board_ns", "kind", "pattern", "text")


@router.get("/console")
def console(request: Request) -> Response:
    """Show the lines of a board's console, or the lines that contain a text."""
    one, file, lines = _read_requested_lines(request)
    shown = lines[-count_rows(request, _LINES) :]
    return get_site(request).render_page(
        request,
        "console.html",
        session=one,
        file=file,
        files=list_consoles(Path(one.folder)),
        wanted=request.query_params.get("q", ""),
        lines=shown,
        total=len(lines),
        first_ns=lines[0].entry.host_ns if lines else 0,
    )


@router.get("/console.csv")
def console_csv(request: Request) -> Response:
    """Return the lines as CSV."""
    _, file, lines = _read_requested_lines(request)
    return csv_answer.respond_with_rows(f"{Path(file).stem} console", _COLUMNS, make_console_rows(lines))


def _read_requested_lines(request: Request) -> tuple[sessions.IndexedSession, str, list[ShownLine]]:
    """Return session, file and lines. Raises UsageError if the file is not a console of the session."""
    with get_site(request).reader.open_snapshot() as database:
        one = sessions.resolve_session(database, request.query_params.get("id", ""), number_of(request, "root"))
    file = unescape_name(request.query_params.get("file", ""))
    if file not in list_consoles(Path(one.folder)):
        raise UsageError(f"console {escape_name(file)[:200]!r} not found in {one.id}")
    try:
        return one, file, read_console(Path(one.folder) / file, request.query_params.get("q", ""))
    except OSError as error:
        raise UsageError(f"{escape_name(file)} cannot be read: {error.strerror}") from error


def _list_lines(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = ("time_s", "host_ns", "board_ns", "kind", "text")
    return [
        {"number": one.number, "pattern": one.pattern, **{name: getattr(one.entry, name) for name in names}}
        for one in values["lines"]
    ]


# URL parameters by path.
PARAMETERS = {
    "/console": (*SESSION, "file", "q"),
    "/console.csv": (*SESSION, "file", "q"),
}

# JSON documents by path and template.
DOCUMENTS = {"/console": {"console.html": describe(ConsolePageDocument, lines=_list_lines)}}

"""Files of a session. Browsers show text and pictures, and download other files."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response

from hil.controller.web.files.kept import own
from hil.controller.web.index import sessions
from hil.controller.web.site import get_site
from hil.controller.web.text.names import escape_name, unescape_name
from hil.controller.web.text.requests import SESSION, number_of
from hil.core.files import open_file
from hil.errors import UsageError

router = APIRouter()
# Maximum bytes of a text to show. Only the end is shown, because a log's errors are at the end.
_SHOWN_BYTES = 256 << 10
_TEXTS = (".log", ".txt", ".mlir", ".ll", ".s", ".json", ".jsonl", ".csv", ".md", ".toml")
_PICTURES = {".png": "image/png", ".jpg": "image/jpeg"}


@router.get("/log")
def log(request: Request) -> Response:
    """Return the end of a session's log as plain text."""
    return _show_end(_find_requested_file(request, suffixes=(".log",)))


@router.get("/file")
def file(request: Request) -> Response:
    """Return a session's file. Browsers show text and pictures, and download other files."""
    path = _find_requested_file(request)
    if path.suffix in _TEXTS and "whole" not in request.query_params:
        return _show_end(path)
    picture = _PICTURES.get(path.suffix, "")
    kind = "inline" if picture else "attachment"
    return FileResponse(
        path,
        media_type=picture or "application/octet-stream",
        filename=escape_name(path.name),
        content_disposition_type=kind,
    )


def _find_requested_file(request: Request, *, suffixes: tuple[str, ...] = ()) -> Path:
    """Return the requested file. Raises UsageError if the file does not belong to the session."""
    site = get_site(request)
    with site.reader.open_snapshot() as database:
        one = sessions.resolve_session(database, request.query_params.get("id", ""), number_of(request, "root"))
    folder, name = Path(one.folder), unescape_name(request.query_params.get("file", ""))
    path = folder / name
    hidden = any(part.startswith(".") for part in PurePosixPath(name).parts)
    if not name or hidden or not own(folder, path) or (suffixes and path.suffix not in suffixes):
        raise UsageError(f"{'log' if suffixes else 'file'} {escape_name(name)[:200]!r} not found in {one.id}")
    # Reject directories, pipes and devices.
    try:
        open_file(path).close()
    except OSError as error:
        raise UsageError(f"{escape_name(path.name)} cannot be read: {error.strerror}") from error
    return path.resolve()


def _show_end(path: Path) -> Response:
    try:
        with open_file(path) as stream:
            length = os.fstat(stream.fileno()).st_size
            stream.seek(max(0, length - _SHOWN_BYTES))
            text = stream.read(_SHOWN_BYTES).decode(errors="replace")
    except OSError as error:
        raise UsageError(f"{escape_name(path.name)} cannot be read: {error.strerror}") from error
    cut = f"(first {length - _SHOWN_BYTES} bytes omitted)\n" if length > _SHOWN_BYTES else ""
    return PlainTextResponse(cut + text)


# URL parameters by path.
PARAMETERS = {
    "/log": (*SESSION, "file", "whole"),
    "/file": (*SESSION, "file", "whole"),
}

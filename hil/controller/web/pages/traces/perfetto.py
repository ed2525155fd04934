"""Perfetto's UI with a stored trace, in a frame of the trace page.

The UI needs WebAssembly, workers and inline styles, which other pages must not use. So the UI has a separate path. The
content security policy of this path allows only resources on the same path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from hil.controller.analysis.profile.perfetto import (
    VIEWER,
    find_perfetto_files,
    get_media_type,
    list_viewer_files,
    make_viewer_policy,
)
from hil.controller.analysis.profile.store import HEAD, TABLE
from hil.controller.analysis.profile.trace import write_comparison
from hil.controller.storage.cache import Cache
from hil.controller.web.files.made import check_room
from hil.controller.web.index.profiles import StoredProfile, find_profile, open_profile, resolve_file, trace_file
from hil.controller.web.site import get_site
from hil.core.files import digest_file, open_file
from hil.errors import UsageError

router = APIRouter()
PATH = "/perfetto/"
_CHUNK = 1 << 20
# A host that a policy can combine with a path. IPv6 addresses do not work.
_HOST = re.compile(r"[A-Za-z0-9.-]+(:[0-9]+)?")
_COMPARISON = "a-b.pftrace.gz"
_VERSION = 2  # format version of comparisons; increase to rebuild cached ones


def make_viewer_hint() -> str:
    """Return installation instructions for the viewer, or "" if it is installed."""
    try:
        find_perfetto_files()
    except UsageError as error:
        return f"{error.message}: {error.hint}"
    return ""


@router.get(PATH)
def viewer(request: Request) -> Response:
    """Return the page around the UI, which loads the trace in the query."""
    find_perfetto_files()
    return _send_viewer_file(request, VIEWER)


@router.get(f"{PATH}ui/{{name:path}}")
def ui(request: Request, name: str) -> Response:
    """Return a file of the UI."""
    path = _list_viewer_files().get(name)
    if path is None:
        raise HTTPException(404, "file not found")
    # The URL does not contain the UI's version, so limit the cache time.
    return _send_viewer_file(request, path, {"cache-control": "private, max-age=600"})


@router.get(f"{PATH}trace")
def trace(request: Request) -> Response:
    """Return the trace of a profile, ``?profile=KEY``, or the merged trace of two, ``?a=KEY&b=KEY``."""
    site, asked = get_site(request), request.query_params
    if "a" in asked or "b" in asked:
        a, b = (find_profile(site.roots, asked.get(name, "")) for name in ("a", "b"))
        path, title = make_comparison(site.roots, a, b), f"A {a.name}, B {b.name}"
    else:
        one = find_profile(site.roots, asked.get("profile", ""))
        path, title = trace_file(site.roots, one), one.name
    return _stream_file(path, {"x-title": quote(title)})


def make_comparison(roots: Sequence[Path], a: StoredProfile, b: StoredProfile) -> Path:
    """Return the merged trace of two profiles, cached by content. Raises UsageError if a profile is damaged."""
    before, after = (open_profile(roots, one) for one in (a, b))
    digests = [digest_file(resolve_file(roots, one, name)) for one in (a, b) for name in (HEAD, TABLE)]
    found = Cache()
    key = found.key("comparison", version=_VERSION, digests=digests)

    def write(folder: Path) -> None:
        check_room(found)
        write_comparison(before, after, folder / _COMPARISON)

    made, _ = found.get_or_make(key, {}, write)
    return made / _COMPARISON


@cache
def _list_viewer_files() -> Mapping[str, Path]:
    return list_viewer_files(find_perfetto_files())


def _send_viewer_file(request: Request, path: Path, headers: Mapping[str, str] | None = None) -> Response:
    policy = make_viewer_policy(path, _make_policy_source(request))
    return _stream_file(path, {"content-security-policy": policy, **(headers or {})})


def _make_policy_source(request: Request) -> str:
    """Return the UI's path as a source for the policy.

    Return the whole server if a policy cannot combine the host with a path.
    """
    host = request.headers.get("host", "")
    return f"{host}{PATH}" if _HOST.fullmatch(host) else "'self'"


def _stream_file(path: Path, headers: Mapping[str, str]) -> Response:
    try:
        file = open_file(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    return _OpenFile(file, get_media_type(path), headers)


class _OpenFile(StreamingResponse):
    """Response with the content of an open file, up to the length when the response was created.

    The file may still grow.

    Closes the file at the end, even if the client disconnects before the first read.
    """

    def __init__(self, file: BinaryIO, media_type: str, headers: Mapping[str, str]) -> None:
        self._file = file
        length = os.fstat(file.fileno()).st_size
        headers = {"content-length": str(length), **headers}
        super().__init__(_read_chunks(file, length), media_type=media_type, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


def _read_chunks(file: BinaryIO, left: int) -> Iterator[bytes]:
    while left > 0 and (piece := file.read(min(left, _CHUNK))):
        left -= len(piece)
        yield piece


# URL parameters by path.
PARAMETERS = {
    f"{PATH}trace": ("profile", "a", "b"),
}

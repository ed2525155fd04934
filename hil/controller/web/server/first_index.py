"""Wait for the first index, so that a page that is opened right after the start of the server shows its session."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Sequence

from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from hil.controller.web.index.sessions import resolve_session
from hil.controller.web.session.sides import get_session
from hil.controller.web.site import WebSite, get_site
from hil.controller.web.text.requests import parse_number
from hil.errors import UsageError

# Maximum seconds to wait: for a session in the URL, and for other pages since the start of the server.
SESSION_SECONDS, START_SECONDS = 5.0, 1.5
_PAUSE_SECONDS = 0.05
_MAX_NAMED = 20
_PAGES = ("GET", "HEAD")
# These answer immediately, and report progress.
_NEVER = ("/events", "/farm/events", "/api/there")


async def wait_for_index(request: Request) -> None:
    """Wait until the first index is complete, or the sessions of the URL are in the index. The time is limited."""
    site = get_site(request)
    if site.progress.first_done or request.method not in _PAGES or request.url.path in _NEVER:
        return
    named = _list_named(request)
    begun = time.monotonic()
    end = begun + SESSION_SECONDS if named else site.started + START_SECONDS
    while not site.progress.first_done and time.monotonic() < end:
        if named:
            are_indexed: bool = await run_in_threadpool(_are_indexed, site, named)
            if are_indexed:
                return
        await asyncio.sleep(_PAUSE_SECONDS)


def _list_named(request: Request) -> list[tuple[str, int]]:
    """Return the sessions in the URL: id and number of the directory, or -1 for a reference with both."""
    query = request.query_params
    try:
        root = parse_number("root", query.get("root", ""))
    except UsageError:
        return []
    ids = [(query["id"], root)] if query.get("id") and request.url.path != "/series" else []
    references = [(one, -1) for name in ("a", "b", "s") for one in query.getlist(name)]
    return (ids + references)[:_MAX_NAMED] if not request.url.path.startswith("/trace") else ids


def _are_indexed(site: WebSite, named: Sequence[tuple[str, int]]) -> bool:
    try:
        with site.reader.open_snapshot() as database:
            for text, root in named:
                if root < 0:
                    get_session(database, text)
                else:
                    resolve_session(database, text, root)
    except (UsageError, sqlite3.Error):
        return False
    return True

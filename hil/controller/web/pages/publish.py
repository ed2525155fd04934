"""API for `hil publish`: missing content, uploads, and creation of sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from hil.controller.web.publish.parcels import check_parcel, check_sizes, read_request
from hil.controller.web.publish.published import Missing, PublishedStore, Refused
from hil.controller.web.site import get_site
from hil.controller.web.text.addresses import link_of
from hil.controller.web.text.names import escape_name
from hil.errors import HilError, StorageError

router = APIRouter(prefix="/publish")
# Maximum concurrent requests in memory. A request is at most as large as a piece. A single client cannot use all slots,
# because :class:`hil.controller.web.access.sharing.FairShare` admits fewer requests per client.
AT_A_TIME = 16
# Threads for uploads. They wait for each other's writes, so they are separate from the threads for pages.
_THREADS = 4
# Minimum speed of a request body in bytes per second, after a delay in seconds. Slower requests are rejected.
_MIN_RATE, _DELAY_S = 32 << 10, 10.0
_limiter = anyio.lowlevel.RunVar[anyio.CapacityLimiter]("hil_publish_threads")


@router.post("/missing")
async def missing(request: Request) -> Response:
    """Return the missing digests among the given ones, with the number of bytes already received."""
    return await _run_authorized(
        request, lambda body: {"missing": store_of(request).missing(check_sizes(read_request(body)))}
    )


@router.put("/blobs/{digest}")
async def blob(request: Request, digest: str) -> Response:
    """Append a piece to an upload."""

    def put(body: bytes) -> dict[str, Any]:
        offset, size = (_parse_number(request.query_params.get(name, "")) for name in ("offset", "size"))
        return {"have": store_of(request).put(digest, offset, size, body)}

    return await _run_authorized(request, put)


@router.post("/sessions")
async def sessions(request: Request) -> Response:
    """Create a session from uploaded files."""

    def finish(body: bytes) -> dict[str, Any]:
        site = get_site(request)
        stored = store_of(request).finish(check_parcel(read_request(body)))
        found = [(number, root) for number, root in site.numbered.items() if stored.folder.is_relative_to(root)]
        links = (link_of(escape_name(stored.folder.relative_to(root).as_posix()), number) for number, root in found)
        return {"id": stored.folder.name, "new": stored.new, "url": f"/session?{next(links, '')}"}

    return await _run_authorized(request, finish)


def store_of(request: Request) -> PublishedStore:
    """Return the store for published sessions."""
    store: PublishedStore = request.app.state.published
    return store


def _parse_number(text: str) -> int:
    if not (text.isdecimal() and len(text) < 16):
        raise Refused(400, "offset and size required")
    return int(text)


async def _run_authorized(request: Request, work: Callable[[bytes], dict[str, Any]]) -> Response:
    """Run ``work`` and return the result or the error as JSON.

    Checks the token again, in addition to :class:`.RequestGuard`.
    """
    if not getattr(request.state, "may_change", False):
        return JSONResponse({"error": "server token required to publish", "hint": ""}, 403)
    turns: asyncio.Semaphore = request.app.state.publishing
    async with turns:
        try:
            body = await _read_body(request)
            return JSONResponse(await anyio.to_thread.run_sync(work, body, limiter=_get_limiter()))
        except Missing as error:
            return JSONResponse({"error": error.message, "hint": error.hint, "missing": error.digests}, error.status)
        except (ValueError, RecursionError):
            return JSONResponse({"error": "invalid JSON", "hint": ""}, 400)
        except HilError as error:
            status = error.status if isinstance(error, Refused) else 507 if isinstance(error, StorageError) else 400
            return JSONResponse({"error": error.message, "hint": error.hint}, status)


async def _read_body(request: Request) -> bytes:
    """Return the request body. Raises Refused if the client sends too slowly."""
    body, begun = bytearray(), anyio.current_time()
    with anyio.move_on_after(_DELAY_S) as scope:
        async for data in request.stream():
            body += data
            scope.deadline = begun + _DELAY_S + len(body) / _MIN_RATE
        return bytes(body)
    text = f"slow upload: at least {_MIN_RATE >> 10} KiB/s required"
    raise Refused(408, text, hint="retry later: the upload resumes")


def _get_limiter() -> anyio.CapacityLimiter:
    """Return the thread limit of the event loop."""
    limiter = _limiter.get(None)
    if limiter is None:
        limiter = anyio.CapacityLimiter(_THREADS)
        _limiter.set(limiter)
    return limiter

"""Save any page as a single HTML file for offline use."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from hil.controller.storage.runs import make_safe_name
from hil.controller.web.files.inner import InnerResponse, ask, is_ours
from hil.controller.web.files.saving import make_single_file, needs_of
from hil.controller.web.templating import format_size
from hil.errors import UsageError

router = APIRouter()
# Maximum size of a saved page, so that it can be mailed and opens quickly.
MAX_BYTES = 20 << 20
# Maximum concurrent saves. Each needs several times the page size in memory.
AT_A_TIME = 2
_ASSETS = ("text/css", "text/javascript", "application/javascript")
_DATA = ("application/json", "application/octet-stream", "image/")
# Base64 growth of embedded pictures and data.
_GROWS = 4 / 3


@router.get("/share")
async def share(request: Request) -> Response:
    """Return the page in the query, ``?page=/session?id=...``, as a file."""
    address = request.query_params.get("page", "")
    if not is_ours(address) or unquote(urlsplit(address).path).rstrip("/") == "/share":
        raise UsageError(f"cannot save {address[:200]!r}: not a page of this server", hint="?page=/session?id=...")
    turns: asyncio.Semaphore = request.app.state.saving
    async with turns:
        text = await save_page(request, address)
    name = make_safe_name(
        "-".join(["hil", urlsplit(address).path.strip("/") or "sessions", time.strftime("%Y%m%d-%H%M%S")])
    )
    headers = {"content-disposition": f'attachment; filename="{name}.html"'}
    return Response(text.encode(), media_type="text/html; charset=utf-8", headers=headers)


async def save_page(request: Request, address: str) -> str:
    """Return a page as a file of at most :data:`MAX_BYTES`.

    Raises UsageError if the page is missing or too large.
    """
    page = await ask(request, address, types=("text/html",), most=MAX_BYTES)
    if page is None:
        raise UsageError(f"the page is larger than {format_size(MAX_BYTES)}", hint="filter the page first")
    if page.status != 200:
        raise UsageError(f"cannot save {address[:200]!r}: open it to see the error")
    text = page.body.decode()
    needs, held = await run_in_threadpool(needs_of, text), _SavedResources(len(page.body))
    for asset in needs.assets:
        held.put(asset, await ask(request, asset, types=_ASSETS, most=MAX_BYTES), 1)
    for one in {**needs.images, **needs.data}:
        held.put(one, await ask(request, one, types=_DATA, most=held.room), _GROWS)
    return await run_in_threadpool(make_single_file, text, held.answers, held.notes)


@dataclass
class _SavedResources:
    """Embedded resources of a saved page, within the size limit."""

    bytes: int
    answers: dict[str, InnerResponse] = field(default_factory=dict)
    too_long: int = 0
    refused: int = 0

    @property
    def room(self) -> int:
        return max(0, MAX_BYTES - self.bytes)

    def put(self, address: str, answer: InnerResponse | None, grows: float) -> None:
        if answer is not None and answer.status != 200:
            self.refused += 1
        elif answer is None or len(answer.body) * grows > self.room:
            self.too_long += 1
        else:
            self.answers[address] = answer
            self.bytes += int(len(answer.body) * grows)

    @property
    def notes(self) -> list[str]:
        limit = f"the limit for a saved page is {format_size(MAX_BYTES)}"
        return [
            *([f"Images or data omitted from this file: {self.too_long}; {limit}."] if self.too_long else ()),
            *([f"Images or data unavailable from the server: {self.refused}."] if self.refused else ()),
        ]


# URL parameters by path.
PARAMETERS = {
    "/share": ("page",),
}

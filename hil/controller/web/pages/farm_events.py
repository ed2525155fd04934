"""What happens at a farm, as it happens, and what its jobs print: server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from hil.controller.farm.messages import ENDED, parse_job
from hil.controller.web.farm_view import FarmView, view_of
from hil.controller.web.live import PACE_S, told_of
from hil.core.text import visible
from hil.errors import FarmUnreachable, HilError

router = APIRouter()
# So many logs are followed at a time; of one so much is shown as text, from its end.
_MOST_FOLLOWED, _LOG_CHARS = 50, 256 << 10
_NUMBER_DIGITS = 18
_MOST_PARTS = 1000
_followed: set[object] = set()


@router.get("/farm/events")
async def farm_events(request: Request) -> StreamingResponse:
    """An event ``farm`` whenever something happened at the farm, or it went away or came back."""
    link = view_of(request).link
    return told_of("farm", request, lambda: link.generation, lambda: link.over)


@router.get("/job/log")
async def job_log(request: Request) -> Response:
    """What a job prints, from the beginning and as it comes, until it has ended: an event for each piece."""
    farm, name = view_of(request), request.query_params.get("name", "")
    parse_job(name)
    if len(_followed) >= _MOST_FOLLOWED:
        return PlainTextResponse("Too many logs are followed already.", 503)
    given = request.headers.get("last-event-id", "")
    after = int(given) if given.isdecimal() and len(given) < _NUMBER_DIGITS else 0
    return StreamingResponse(_log_events(request, farm, name, after), media_type="text/event-stream")


async def _log_events(request: Request, farm: FarmView, name: str, after: int) -> AsyncIterator[str]:
    me, quiet = object(), True
    _followed.add(me)
    try:
        while not (farm.link.over or await request.is_disconnected()):
            try:
                # Asked before what it printed: what it printed last it did before its end.
                ended = quiet and await run_in_threadpool(_has_ended, farm, name)
                pieces = await run_in_threadpool(farm.ask, "logs", name=name, after=after)
            except FarmUnreachable:
                yield ": the farm is away\n\n"
                await asyncio.sleep(PACE_S)
                continue
            except HilError as error:
                yield f"event: over\ndata: {json.dumps(error.message)}\n\n"
                return
            for piece in pieces:
                after = piece["number"]
                yield f"id: {after}\ndata: {json.dumps(_text(piece, name))}\n\n"
            if (quiet := not pieces) and ended:
                yield 'event: over\ndata: ""\n\n'
                return
            if quiet:
                await asyncio.sleep(PACE_S)
    finally:
        _followed.discard(me)


def _has_ended(farm: FarmView, name: str) -> bool:
    """Whether nothing more is printed."""
    submission, number = parse_job(name)
    named = number is not None
    rows = [farm.ask("job", name=name)] if named else farm.ask("jobs", submission=submission, limit=_MOST_PARTS)
    return all(row["state"] in ENDED for row in rows)


def _text(piece: dict[str, Any], name: str) -> str:
    text = visible(piece["text"])
    if piece["job"] == name:
        return text
    return "".join(f"{piece['job']}  {line}" for line in text.splitlines(keepends=True))


@router.get("/job/log.txt")
def job_log_text(request: Request) -> Response:
    """The end of what a job has printed until now."""
    farm, name = view_of(request), request.query_params.get("name", "")
    parse_job(name)
    return PlainTextResponse(printed(farm, name))


def printed(farm: FarmView, name: str) -> str:
    """The end of what a job has printed until now; errors are those of asking the farm."""
    kept: deque[str] = deque()
    size = after = 0
    while pieces := farm.ask("logs", name=name, after=after):
        after = pieces[-1]["number"]
        for piece in pieces:
            kept.append(_text(piece, name))
            size += len(kept[-1])
            while len(kept) > 1 and size > _LOG_CHARS:
                size -= len(kept.popleft())
    return "".join(kept)[-_LOG_CHARS:]

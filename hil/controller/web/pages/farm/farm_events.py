"""Server-sent events for farm events and job logs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from hil.controller.farm.messages import ENDED, parse_job
from hil.controller.records.lab.farm import LogPiece
from hil.controller.web.live import PACE_SECONDS, stream_counts
from hil.controller.web.pages.farm.view import FarmView, view_of
from hil.core.text import escape_controls
from hil.errors import FarmUnreachable, HilError

router = APIRouter()
# Maximum logs and consoles that are followed at the same time, in total and per user.
_MOST_FOLLOWED, _MOST_OF_USER = 50, 10
# Threads that read followed logs, so that a slow farm does not delay pages.
_LOG_THREADS = 4
# Maximum characters to show as text, from the end of a log.
_LOG_CHARS = 256 << 10
_NUMBER_DIGITS = 18
_MAX_PARTS = 1000
# Timeout for reading a log for a page, in seconds.
_LOG_SECONDS = 10.0
_LONGER = "\n[truncated: hil farm logs {name} prints the full log]\n"
_followed: dict[object, str] = {}  # the user of each followed log or console
_threads: RunVar[CapacityLimiter] = RunVar("_threads")
T = TypeVar("T")


@router.get("/farm/events")
async def farm_events(request: Request) -> StreamingResponse:
    """Send a ``farm`` event after every farm event, connect and disconnect."""
    link = view_of(request).link
    return stream_counts("farm", request, lambda: link.generation, lambda: link.over)


@router.get("/job/log")
async def job_log(request: Request) -> Response:
    """Stream a job's log from the start to the job's end, with an event for every piece."""
    farm, name = view_of(request), request.query_params.get("name", "")
    parse_job(name)
    if refusal := check_stream_limits(farm.visitor.user):
        return refusal
    given = request.headers.get("last-event-id", "")
    after = int(given) if given.isdecimal() and len(given) < _NUMBER_DIGITS else 0
    return StreamingResponse(_stream_log(request, farm, name, after), media_type="text/event-stream")


def check_stream_limits(user: str) -> Response | None:
    """Return an error response if the user may not follow another log or console, or None."""
    if len(_followed) >= _MOST_FOLLOWED:
        return PlainTextResponse("The limit of open log streams is reached.", 503)
    if list(_followed.values()).count(user) >= _MOST_OF_USER:
        return PlainTextResponse("The limit of open log streams per user is reached.", 429)
    return None


@contextlib.contextmanager
def count_stream(user: str) -> Iterator[None]:
    """Count a stream of a log or console for the limits during a block."""
    me = object()
    _followed[me] = user
    try:
        yield
    finally:
        del _followed[me]


async def _stream_log(request: Request, farm: FarmView, name: str, after: int) -> AsyncIterator[str]:
    quiet = True
    # Check again, because many requests can pass the first check before their streams start.
    if refusal := check_stream_limits(farm.visitor.user):
        yield f"event: over\ndata: {json.dumps(bytes(refusal.body).decode())}\n\n"
        return
    with count_stream(farm.visitor.user):
        while not (farm.link.over or await request.is_disconnected()):
            try:
                # Check the state before reading the log, so that the log is complete if the job has ended.
                ended = quiet and await _read_in_thread(_has_ended, farm, name)
                pieces = await _read_in_thread(_list_new_log_pieces, farm, name, after)
            except FarmUnreachable:
                yield ": the farm is away\n\n"
                await asyncio.sleep(PACE_SECONDS)
                continue
            except HilError as error:
                yield f"event: over\ndata: {json.dumps(error.message)}\n\n"
                return
            for piece in pieces:
                after = piece.number
                yield f"id: {after}\ndata: {json.dumps(_format_piece(piece, name))}\n\n"
            if (quiet := not pieces) and ended:
                yield 'event: over\ndata: ""\n\n'
                return
            if quiet:
                await asyncio.sleep(PACE_SECONDS)


async def _read_in_thread(read: Callable[..., T], *arguments: Any) -> T:
    """Call a function in one of the threads for followed logs."""
    try:
        threads = _threads.get()
    except LookupError:
        threads = CapacityLimiter(_LOG_THREADS)
        _threads.set(threads)
    return await to_thread.run_sync(read, *arguments, limiter=threads)


def _list_new_log_pieces(farm: FarmView, name: str, after: int) -> list[LogPiece]:
    """Return the log pieces after a number. Repeated pieces from a hostile gateway are dropped."""
    found: list[LogPiece] = []
    for piece in farm.ask("logs", name=name, after=after):
        if piece.number > after:
            after = piece.number
            found.append(piece)
    return found


def _has_ended(farm: FarmView, name: str) -> bool:
    """Return True if all jobs have ended, so that the log is complete."""
    submission, number = parse_job(name)
    named = number is not None
    rows = [farm.ask("job", name=name)] if named else farm.ask("jobs", submission=submission, limit=_MAX_PARTS)
    return all(row.state in ENDED for row in rows)


def _format_piece(piece: LogPiece, name: str) -> str:
    text = escape_controls(piece.text)
    if piece.job == name:
        return text
    return "".join(f"{piece.job}  {line}" for line in text.splitlines(keepends=True))


@router.get("/job/log.txt")
def job_log_text(request: Request) -> Response:
    """Return the current end of a job's log."""
    farm, name = view_of(request), request.query_params.get("name", "")
    parse_job(name)
    return PlainTextResponse(read_log_end(farm, name))


def read_log_end(farm: FarmView, name: str) -> str:
    """Return the current end of a job's log. Reading stops after :data:`_LOG_SECONDS` seconds.

    Raises the errors of :meth:`.FarmView.ask`.
    """
    kept: deque[str] = deque()
    size = after = 0
    deadline = time.monotonic() + _LOG_SECONDS
    while pieces := _list_new_log_pieces(farm, name, after):
        after = pieces[-1].number
        if time.monotonic() >= deadline:
            kept.append(_LONGER.format(name=name))
            break
        for piece in pieces:
            kept.append(_format_piece(piece, name))
            size += len(kept[-1])
            while len(kept) > 1 and size > _LOG_CHARS:
                size -= len(kept.popleft())
    return "".join(kept)[-_LOG_CHARS:]


# URL parameters by path.
PARAMETERS = {
    "/job/log": ("name",),
    "/job/log.txt": ("name",),
}

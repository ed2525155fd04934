"""Notify pages about changes with server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from fastapi import Request
from fastapi.responses import StreamingResponse

# Minimum seconds between events to a page, because a run may write constantly.
PACE_SECONDS = 1.0
# Seconds between keep-alive comments, which detect dead connections.
ALIVE_SECONDS = 15.0
# Maximum streams, so that streams do not use all connections. At the limit, the server ends the oldest stream, and the
# browser reconnects.
MAX_STREAMS = 128


def stream_counts(
    event: str, request: Request, count: Callable[[], int], is_over: Callable[[], bool]
) -> StreamingResponse:
    """Return an event stream that sends the result of ``count`` after every change of the result.

    The stream ends with the server or the connection.
    """

    streams: dict[asyncio.Event, None] = request.app.state.streams

    async def stream() -> AsyncIterator[str]:
        ended, seen, quiet = asyncio.Event(), -1, 0.0
        streams[ended] = None
        if len(streams) > MAX_STREAMS:
            oldest = next(iter(streams))
            del streams[oldest]
            oldest.set()
        try:
            while not (ended.is_set() or is_over() or await request.is_disconnected()):
                if count() != seen:
                    seen, quiet = count(), 0.0
                    yield f"event: {event}\ndata: {seen}\n\n"
                elif quiet >= ALIVE_SECONDS:
                    quiet = 0.0
                    yield ": still here\n\n"
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(ended.wait(), PACE_SECONDS)
                quiet += PACE_SECONDS
        finally:
            streams.pop(ended, None)

    return StreamingResponse(stream(), media_type="text/event-stream")

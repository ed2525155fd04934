"""Tell a page whenever something changed, as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from fastapi import Request
from fastapi.responses import StreamingResponse

# A page is told at most so often: of a run that writes all the time it need not show each case.
PACE_S = 1.0
# A connection that nobody reads is found by this, and closed.
ALIVE_S = 15.0


def told_of(event: str, request: Request, count: Callable[[], int], is_over: Callable[[], bool]) -> StreamingResponse:
    """An event of a name, with how far it is, whenever a count changed; until it is over, or nobody listens."""

    async def stream() -> AsyncIterator[str]:
        seen, quiet = -1, 0.0
        while not (is_over() or await request.is_disconnected()):
            if count() != seen:
                seen, quiet = count(), 0.0
                yield f"event: {event}\ndata: {seen}\n\n"
            elif quiet >= ALIVE_S:
                quiet = 0.0
                yield ": still here\n\n"
            await asyncio.sleep(PACE_S)
            quiet += PACE_S

    return StreamingResponse(stream(), media_type="text/event-stream")

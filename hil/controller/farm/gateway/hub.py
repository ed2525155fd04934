"""What changes in the farm, handed to whoever at this gateway waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from hil.controller.farm.desk import changes

Change = Mapping[str, Any]
AGAIN: Change = {"kind": "again"}
# Whoever is so far behind looks at everything again instead.
_MOST = 10_000


class Hub:
    """One listener on the database, many inside."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Queue[Change]] = set()

    @contextlib.contextmanager
    def subscribed(self) -> Iterator[asyncio.Queue[Change]]:
        """A queue of what changes from now on; ``{"kind": "again"}`` where something may have been missed."""
        queue: asyncio.Queue[Change] = asyncio.Queue(_MOST)
        self._waiting.add(queue)
        try:
            yield queue
        finally:
            self._waiting.discard(queue)

    def tell(self, change: Change) -> None:
        """Hand a change to everybody."""
        for queue in self._waiting:
            if queue.full():
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(AGAIN)
            else:
                queue.put_nowait(change)

    async def run(self, url: str) -> None:
        """Listen until cancelled."""
        async for change in changes.listen(url):
            self.tell(change)


async def drained(queue: asyncio.Queue[Change], timeout_s: float | None = None) -> list[Change]:
    """All that waits in a queue: at least one, or none when nothing comes in time."""
    try:
        found = [await asyncio.wait_for(queue.get(), timeout_s)]
    except (TimeoutError, asyncio.TimeoutError):
        return []
    while not queue.empty():
        found.append(queue.get_nowait())
    return found

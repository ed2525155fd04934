"""Notify all gateways of changes with PostgreSQL's NOTIFY on commit, and distribute them within a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

import psycopg
from psycopg import sql

from hil.controller.farm.database.database import DatabaseAway, Tx, connect

CHANNEL = "hil_farm"
# PostgreSQL allows 8000 bytes per notification; readers get full texts from the tables.
_MAX_TEXT_LENGTH = 200
_AGAIN_SECONDS = (0.1, 2.0)
# Interval for probing a silent connection.
_SILENCE_SECONDS = 15.0


async def publish_change(tx: Tx, change: Mapping[str, Any]) -> None:
    """Send a change (``kind`` and further fields) when this transaction commits."""
    short = {key: value[:_MAX_TEXT_LENGTH] if isinstance(value, str) else value for key, value in change.items()}
    await tx.execute("select pg_notify(%s, %s)", [CHANNEL, json.dumps(short)])


async def listen(url: str) -> AsyncGenerator[dict[str, Any], None]:
    """Yield changes endlessly.

    The first item, and the first item after every outage, is ``{"kind": "again"}``. Then the function yields all later
    changes. Read earlier changes from the tables.
    """
    async with contextlib.aclosing(iter_notifications(url, CHANNEL)) as heard:
        async for text in heard:
            yield {"kind": "again"} if text is None else json.loads(text)


async def iter_notifications(url: str, channel: str) -> AsyncGenerator[str | None, None]:
    """Yield the payloads of a channel endlessly. Yield None at first and after every outage."""
    wait_s = _AGAIN_SECONDS[0]
    while True:
        with contextlib.suppress(DatabaseAway, psycopg.OperationalError):
            async with await connect(url) as connection:
                await connection.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
                yield None
                wait_s = _AGAIN_SECONDS[0]
                while True:
                    async for one in connection.notifies(timeout=_SILENCE_SECONDS):
                        yield one.payload
                    await connection.execute("select 1")
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, _AGAIN_SECONDS[1])


Change = Mapping[str, Any]
AGAIN: Change = {"kind": "again"}
# Maximum queued changes. A subscriber that falls further behind must read all data from the tables.
_MAX_QUEUED = 10_000


class PubSub:
    """Distributes the changes of one database listener to many subscribers."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Queue[Change]] = set()

    @contextlib.contextmanager
    def subscribe(self) -> Iterator[asyncio.Queue[Change]]:
        """Yield a queue of future changes. ``{"kind": "again"}`` means that changes may be missing."""
        queue: asyncio.Queue[Change] = asyncio.Queue(_MAX_QUEUED)
        self._waiting.add(queue)
        try:
            yield queue
        finally:
            self._waiting.discard(queue)

    def tell(self, change: Change) -> None:
        """Send a change to all subscribers."""
        for queue in self._waiting:
            if queue.full():
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(AGAIN)
            else:
                queue.put_nowait(change)

    async def run(self, url: str) -> None:
        """Task: listen and distribute changes."""
        async for change in listen(url):
            self.tell(change)


async def drain_queue(queue: asyncio.Queue[Change], timeout_s: float | None = None) -> list[Change]:
    """Return all queued changes. Waits for at least one; returns an empty list after the timeout."""
    try:
        found = [await asyncio.wait_for(queue.get(), timeout_s)]
    except (TimeoutError, asyncio.TimeoutError):
        return []
    while not queue.empty():
        found.append(queue.get_nowait())
    return found

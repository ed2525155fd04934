"""What happens in the farm, told to all gateways at once by PostgreSQL's NOTIFY, when the transaction is committed, and
handed to whoever at this gateway waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

import psycopg
from psycopg import sql

from hil.controller.farm.store.database import DatabaseAway, Tx, connect

CHANNEL = "hil_farm"
# PostgreSQL takes 8000 bytes; longer texts can be read where they are kept.
_LONGEST_TEXT = 200
_AGAIN_S = (0.1, 2.0)
# So often a silent connection is tried.
_SILENCE_S = 15.0


async def tell(tx: Tx, change: Mapping[str, Any]) -> None:
    """Tell a change, if this transaction is committed: ``kind`` and what else belongs to it."""
    short = {key: value[:_LONGEST_TEXT] if isinstance(value, str) else value for key, value in change.items()}
    await tx.execute("select pg_notify(%s, %s)", [CHANNEL, json.dumps(short)])


async def listen(url: str) -> AsyncGenerator[dict[str, Any], None]:
    """The changes as they come, without end. ``{"kind": "again"}`` comes first, and after each outage: from then on
    nothing is missed, but what was before must be looked up.
    """
    async with contextlib.aclosing(hear(url, CHANNEL)) as heard:
        async for text in heard:
            yield {"kind": "again"} if text is None else json.loads(text)


async def hear(url: str, channel: str) -> AsyncGenerator[str | None, None]:
    """What is said in a channel, without end; None at first and after each outage."""
    wait_s = _AGAIN_S[0]
    while True:
        with contextlib.suppress(DatabaseAway, psycopg.OperationalError):
            async with await connect(url) as connection:
                await connection.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
                yield None
                wait_s = _AGAIN_S[0]
                while True:
                    async for one in connection.notifies(timeout=_SILENCE_S):
                        yield one.payload
                    await connection.execute("select 1")
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, _AGAIN_S[1])


Change = Mapping[str, Any]
AGAIN: Change = {"kind": "again"}
# Whoever is so far behind looks at everything again instead.
_MOST = 10_000


class PubSub:
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
        async for change in listen(url):
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

"""Test that changes reach all listeners, after the commit only."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hil.controller.farm.database.database import Database
from hil.controller.farm.database.notifications import listen, publish_change


def test_listeners_receive_committed_changes_in_order(farm_db: str) -> None:
    async def hear(count: int, ready: asyncio.Event) -> list[dict[str, Any]]:
        heard = []
        listening = listen(farm_db)
        async for change in listening:
            heard.append(change)
            ready.set()
            if len(heard) == count:
                await listening.aclose()
                break
        return heard

    async def main() -> None:
        events = [asyncio.Event() for _ in range(2)]
        listeners = [asyncio.create_task(hear(3, event)) for event in events]
        for event in events:
            await event.wait()
        database = await Database.open(farm_db)
        with pytest.raises(ZeroDivisionError):
            async with database.transaction() as tx:
                await publish_change(tx, {"kind": "board", "board": "never"})
                raise ZeroDivisionError
        first, second = {"kind": "board", "board": "pi"}, {"kind": "log", "job": 7}
        async with database.transaction() as tx:
            await publish_change(tx, first)
            await publish_change(tx, second)
        for listener in listeners:
            assert await asyncio.wait_for(listener, 60) == [{"kind": "again"}, first, second]
        await database.close()

    asyncio.run(main())


def test_notification_shortens_long_text(farm_db: str) -> None:
    async def main() -> None:
        listening = listen(farm_db)
        await anext(listening)
        database = await Database.open(farm_db)
        async with database.transaction() as tx:
            await publish_change(tx, {"kind": "ended", "lease": 1, "board": "pi", "reason": "\U0001f600" * 10_000})
        heard = await asyncio.wait_for(anext(listening), 60)
        assert heard["lease"] == 1 and heard["reason"] == "\U0001f600" * 200
        await listening.aclose()
        await database.close()

    asyncio.run(main())

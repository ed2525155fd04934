from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("psycopg", reason="needs the extra `farm`")

from hil.controller.farm.database.notifications import _MOST, AGAIN, PubSub, drained


def test_pubsub_delivers_changes_to_all_subscribers() -> None:
    async def run() -> None:
        hub = PubSub()
        with hub.subscribed() as one:
            with hub.subscribed() as two:
                hub.tell({"kind": "job", "job": 1})
            hub.tell({"kind": "job", "job": 2})
            assert [change["job"] for change in await drained(one)] == [1, 2]
            assert [change["job"] for change in await drained(two)] == [1]
            assert await drained(two, 0.01) == []

    asyncio.run(run())


def test_pubsub_sends_reload_to_slow_subscriber() -> None:
    async def run() -> None:
        hub = PubSub()
        with hub.subscribed() as queue:
            for number in range(_MOST + 3):
                hub.tell({"kind": "job", "job": number})
            found = await drained(queue)
            assert found[0] == AGAIN and [change["job"] for change in found[1:]] == [_MOST + 1, _MOST + 2]

    asyncio.run(run())

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("psycopg", reason="needs the extra `farm`")

from hil.controller.farm.database.notifications import _MAX_QUEUED, AGAIN, PubSub, drain_queue


def test_pubsub_delivers_changes_to_all_subscribers() -> None:
    async def run() -> None:
        hub = PubSub()
        with hub.subscribe() as one:
            with hub.subscribe() as two:
                hub.tell({"kind": "job", "job": 1})
            hub.tell({"kind": "job", "job": 2})
            assert [change["job"] for change in await drain_queue(one)] == [1, 2]
            assert [change["job"] for change in await drain_queue(two)] == [1]
            assert await drain_queue(two, 0.01) == []

    asyncio.run(run())


def test_pubsub_sends_reload_to_slow_subscriber() -> None:
    async def run() -> None:
        hub = PubSub()
        with hub.subscribe() as queue:
            for number in range(_MAX_QUEUED + 3):
                hub.tell({"kind": "job", "job": number})
            found = await drain_queue(queue)
            assert found[0] == AGAIN and [change["job"] for change in found[1:]] == [_MAX_QUEUED + 1, _MAX_QUEUED + 2]

    asyncio.run(run())

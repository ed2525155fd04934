"""Test job output: order, notification of followers, and the size limit."""

from __future__ import annotations

import asyncio

import pytest
from support.farm_rows import board, job, lease, submission, with_tx

from hil.controller.farm.database.database import Database, Tx
from hil.controller.farm.database.notifications import listen
from hil.controller.farm.store import event_log
from hil.controller.farm.store.records import fetch_rows


async def running(tx: Tx, name: str = "pi") -> tuple[int, int]:
    """Return a job and its lease."""
    await board(tx, name)
    number = await job(tx, await submission(tx, key=name), state="running")
    return number, await lease(tx, number, name)


def test_output_returns_texts_in_order_after_number(farm_db: str) -> None:
    async def work(tx: Tx) -> None:
        one, its = await running(tx)
        other, others = await running(tx, "jetson")
        for lease_, text in ((its, "a\n"), (others, "x\n"), (its, "b\n")):
            await event_log.append_output(tx, lease_, text)
        both = await event_log.read_output_after(tx, [one, other])
        assert [(row.job, row.text) for row in both] == [("1", "a\n"), ("2", "x\n"), ("1", "b\n")]
        assert await event_log.read_output_after(tx, [one], both[0].number) == [both[2]]
        assert await event_log.read_output_after(tx, [one, other], limit=1) == both[:1]
        assert await event_log.read_output_after(tx, []) == []

    with_tx(farm_db, work)


def test_output_limits_size_of_each_read(farm_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "_MAX_READ", 100)

    async def work(tx: Tx) -> None:
        number, its = await running(tx)
        texts = [letter * size for letter, size in (("a", 500), ("b", 60), ("c", 30), ("d", 60), ("e", 1))]
        for text in texts:
            await event_log.append_output(tx, its, text)
        read: list[list[str]] = []
        after = 0
        while rows := await event_log.read_output_after(tx, [number], after):
            read.append([row.text[0] for row in rows])
            after = rows[-1].number
        assert read == [["a"], ["b", "c", "d"], ["e"]]

    with_tx(farm_db, work)


def test_append_output_ignores_unknown_lease(farm_db: str) -> None:
    async def work(tx: Tx) -> None:
        _, known = await running(tx)
        await event_log.append_output(tx, known + 1, "x")
        assert await fetch_rows(tx, "select text from hil.logs") == []
        await event_log.append_output(tx, known, "y")
        assert await fetch_rows(tx, "select text from hil.logs") == [{"text": "y"}]

    with_tx(farm_db, work)


@pytest.mark.parametrize("text", ["\0zero", "\ud800half", "ä" * 100_000])
def test_output_stores_any_text(farm_db: str, text: str) -> None:
    async def work(tx: Tx) -> str:
        number, its = await running(tx)
        await event_log.append_output(tx, its, text)
        return str((await event_log.read_output_after(tx, [number]))[0].text)

    kept = with_tx(farm_db, work)
    assert len(kept) == len(text) and kept[1:] == text[1:]


def test_append_output_truncates_at_size_limit(farm_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_BYTES", 10)

    async def work(tx: Tx) -> None:
        number, its = await running(tx)
        for _ in range(5):
            await event_log.append_output(tx, its, "123456")
        kept = [row.text for row in await event_log.read_output_after(tx, [number])]
        assert kept[0] == "123456" and "output limit exceeded" in kept[1] and len(kept) == 2

    with_tx(farm_db, work)


def test_output_numbers_become_visible_in_order(farm_db: str) -> None:
    """Test that output numbers become visible in order, independent of the order of commits."""

    async def main() -> None:
        database = await Database.open(farm_db)
        try:
            async with database.transaction() as tx:
                one, its = await running(tx)
                other, others = await running(tx, "jetson")
            async with database.transaction() as slow:
                await event_log.append_output(slow, its, "first")
                fast = asyncio.create_task(append(others, "second"))
                await asyncio.sleep(0.2)
                async with database.transaction() as reader:
                    assert await event_log.read_output_after(reader, [one, other]) == []
            await fast
            async with database.transaction() as reader:
                assert [row.text for row in await event_log.read_output_after(reader, [one, other])] == [
                    "first",
                    "second",
                ]
        finally:
            await database.close()

    async def append(lease_: int, text: str) -> None:
        other = await Database.open(farm_db)
        async with other.transaction() as tx:
            await event_log.append_output(tx, lease_, text)
        await other.close()

    asyncio.run(main())


def test_followers_are_notified_of_output(farm_db: str) -> None:
    async def main() -> None:
        changes = listen(farm_db)
        assert await anext(changes) == {"kind": "again"}
        database = await Database.open(farm_db)
        async with database.transaction() as tx:
            number, its = await running(tx)
            await event_log.append_output(tx, its, "x")
        assert await asyncio.wait_for(anext(changes), 60) == {"kind": "log", "job": number}
        await database.close()
        await changes.aclose()

    asyncio.run(main())

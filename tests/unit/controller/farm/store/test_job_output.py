"""What jobs print: in order, once, told to followers, and not without end."""

from __future__ import annotations

import asyncio

import pytest
from support.farm_rows import board, job, lease, submission, with_tx

from hil.controller.farm.store import event_log
from hil.controller.farm.store.database import Database, Tx
from hil.controller.farm.store.notifications import listen


async def running(tx: Tx, name: str = "pi") -> tuple[int, int]:
    """A job and its lease."""
    await board(tx, name)
    number = await job(tx, await submission(tx, key=name), state="running")
    return number, await lease(tx, number, name)


def test_texts_come_back_in_order_and_after_a_number(farm_db: str) -> None:
    async def work(tx: Tx) -> None:
        one, its = await running(tx)
        other, others = await running(tx, "jetson")
        for lease_, text in ((its, "a\n"), (others, "x\n"), (its, "b\n")):
            await event_log.append_output(tx, lease_, text)
        both = await event_log.output_after(tx, [one, other])
        assert [(row["job"], row["text"]) for row in both] == [("1", "a\n"), ("2", "x\n"), ("1", "b\n")]
        assert await event_log.output_after(tx, [one], both[0]["number"]) == [both[2]]
        assert await event_log.output_after(tx, [one, other], limit=1) == both[:1]
        assert await event_log.output_after(tx, []) == []

    with_tx(farm_db, work)


def test_of_long_texts_a_few_are_read_at_a_time(farm_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "_MOST_READ", 100)

    async def work(tx: Tx) -> None:
        number, its = await running(tx)
        texts = [letter * size for letter, size in (("a", 500), ("b", 60), ("c", 30), ("d", 60), ("e", 1))]
        for text in texts:
            await event_log.append_output(tx, its, text)
        read: list[list[str]] = []
        after = 0
        while rows := await event_log.output_after(tx, [number], after):
            read.append([row["text"][0] for row in rows])
            after = rows[-1]["number"]
        assert read == [["a"], ["b", "c", "d"], ["e"]]

    with_tx(farm_db, work)


def test_a_lease_that_there_is_not_prints_nothing(farm_db: str) -> None:
    with_tx(farm_db, lambda tx: event_log.append_output(tx, 9, "x"))


@pytest.mark.parametrize("text", ["\0zero", "\ud800half", "ä" * 100_000])
def test_any_text_can_be_kept(farm_db: str, text: str) -> None:
    async def work(tx: Tx) -> str:
        number, its = await running(tx)
        await event_log.append_output(tx, its, text)
        return str((await event_log.output_after(tx, [number]))[0]["text"])

    kept = with_tx(farm_db, work)
    assert len(kept) == len(text) and kept[1:] == text[1:]


def test_a_job_that_prints_without_end_is_cut_off_once(farm_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MOST_BYTES", 10)

    async def work(tx: Tx) -> None:
        number, its = await running(tx)
        for _ in range(5):
            await event_log.append_output(tx, its, "123456")
        kept = [row["text"] for row in await event_log.output_after(tx, [number])]
        assert kept[0] == "123456" and "more than the farm keeps" in kept[1] and len(kept) == 2

    with_tx(farm_db, work)


def test_who_has_seen_a_number_has_missed_none_before_it(farm_db: str) -> None:
    """Numbers become visible in their order, whoever commits first."""

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
                    assert await event_log.output_after(reader, [one, other]) == []
            await fast
            async with database.transaction() as reader:
                assert [row["text"] for row in await event_log.output_after(reader, [one, other])] == [
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


def test_followers_are_told(farm_db: str) -> None:
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

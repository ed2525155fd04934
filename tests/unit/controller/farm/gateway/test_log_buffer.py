from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

pytest.importorskip("psycopg", reason="needs the extra `farm`")

from hil.controller.farm.database.database import DatabaseAway
from hil.controller.farm.gateway import log_buffer
from hil.controller.farm.gateway.log_buffer import LogBuffer


class Outages:
    """Database that is unavailable for the first few transactions."""

    def __init__(self, count: int) -> None:
        self.count = count

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[str]:
        if self.count:
            self.count -= 1
            raise DatabaseAway("gone")
        yield "tx"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []

    async def append(tx: Any, lease: int, text: str) -> None:
        found.append((lease, text))

    monkeypatch.setattr("hil.controller.farm.store.event_log.append_output", append)
    monkeypatch.setattr(log_buffer, "_AWAY_SECONDS", 0.01)
    return found


def run(outages: int, work: Callable[[LogBuffer], Any]) -> None:
    async def go() -> None:
        one = LogBuffer(Outages(outages))
        writer = asyncio.create_task(one.run())
        await asyncio.wait_for(work(one), 60)
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)

    asyncio.run(go())


def test_log_buffer_flush_writes_all_leases(written: list[tuple[int, str]]) -> None:
    async def work(one: LogBuffer) -> None:
        await one.add(1, "a")
        await one.add(2, "b")
        await one.flush()
        assert written == [(1, "a"), (2, "b")]

    run(1, work)


@pytest.mark.parametrize("outages", [0, 3])
def test_log_buffer_preserves_line_order_across_outages(written: list[tuple[int, str]], outages: int) -> None:
    async def work(one: LogBuffer) -> None:
        for number in range(50):
            await one.add(number % 2, f"{number}\n")
            if number == 25:
                await one.flush(1)
        await one.flush(0)
        await one.flush(1)

    run(outages, work)
    for lease in (0, 1):
        text = "".join(text for of, text in written if of == lease)
        assert text == "".join(f"{number}\n" for number in range(lease, 50, 2))


def test_log_buffer_blocks_writers_above_size_limit(
    written: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_buffer, "_MAX_CHARACTERS", 100)

    async def work(one: LogBuffer) -> None:
        for _ in range(10):
            await one.add(1, "x" * 60)
            assert one._size <= 160
        await one.flush(1)

    run(2, work)
    assert sum(len(text) for _, text in written) == 600


def test_log_buffer_replaces_nul_characters(written: list[tuple[int, str]]) -> None:
    async def work(one: LogBuffer) -> None:
        await one.add(1, "a\0b")
        await one.flush(1)

    run(0, work)
    assert written == [(1, "a\ufffdb")]


def test_log_buffer_writes_cases_before_their_lines(
    written: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def keep(tx: Any, lease: int, cases: tuple[tuple[str, str, str], ...]) -> None:
        written.extend((lease, name) for name, *_ in cases)

    monkeypatch.setattr("hil.controller.farm.store.case_results.keep", keep)

    async def work(one: LogBuffer) -> None:
        await one.add(1, "x", (("a", "PASS", ""),))
        await one.add(1, "", (("b", "FAIL", "wrong"),))
        await one.add(2, "", (("c", "PASS", ""),))
        await one.flush()
        assert one._size == 0

    run(1, work)
    assert written == [(1, "a"), (1, "b"), (1, "x"), (2, "c")]


def test_log_buffer_drops_rejected_lines_and_continues(
    written: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = log_buffer.event_log.append_output

    async def append(tx: Any, lease: int, text: str) -> None:
        if lease == 1:
            raise ValueError("no such lease")
        await whole(tx, lease, text)

    monkeypatch.setattr("hil.controller.farm.store.event_log.append_output", append)

    async def work(one: LogBuffer) -> None:
        await one.add(1, "bad")
        await one.flush(1)
        await one.add(2, "good")
        await one.flush(2)

    run(0, work)
    assert written == [(2, "good")]

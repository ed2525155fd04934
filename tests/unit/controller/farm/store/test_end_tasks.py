from __future__ import annotations

import asyncio
import time

import pytest

from hil.controller.farm.database import database as tasks
from hil.controller.farm.database.database import end_tasks


async def deaf(times: int) -> None:
    """Ignore a number of cancellations."""
    for _ in range(times):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue
    await asyncio.sleep(60)


async def begun(*work: asyncio.Task[None]) -> None:
    for _ in range(3):
        await asyncio.sleep(0)
    assert not any(one.done() for one in work)


def test_end_tasks_repeats_ignored_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_CANCEL_AGAIN_SECONDS", 0.01)

    async def main() -> None:
        work = [asyncio.create_task(deaf(times)) for times in (0, 1, 3)]
        await begun(*work)
        await end_tasks(*work)
        assert all(one.cancelled() for one in work)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_end_tasks_waits_for_cleanup_with_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_CANCEL_AGAIN_SECONDS", 30.0)

    async def tidy() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.2)
            raise ValueError("could not tidy up")

    async def main() -> None:
        work = asyncio.create_task(tidy())
        await begun(work)
        began = time.monotonic()
        await end_tasks(work)
        assert time.monotonic() - began >= 0.19
        assert isinstance(work.exception(), ValueError)

    asyncio.run(main())


def test_end_tasks_finishes_when_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_CANCEL_AGAIN_SECONDS", 0.01)

    async def main() -> None:
        inner = asyncio.create_task(deaf(3))

        async def outer() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await end_tasks(inner)

        work = asyncio.create_task(outer())
        await begun(work, inner)
        await end_tasks(work)
        assert work.cancelled()
        assert inner.cancelled()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_end_tasks_ignores_finished_tasks() -> None:
    async def main() -> None:
        done = asyncio.create_task(asyncio.sleep(0, "well"))
        await done
        await end_tasks(done)
        assert done.result() == "well"
        await end_tasks()

    asyncio.run(main())

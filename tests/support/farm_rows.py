"""Insert rows in the farm's tables for tests, without the farm's own logic."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


def with_tx(url: str, work: Callable[[Any], Awaitable[T]]) -> T:
    """Run a function in a separate transaction."""
    from hil.controller.farm.database.database import Database

    async def main() -> T:
        database = await Database.open(url)
        try:
            async with database.transaction() as tx:
                return await work(tx)
        finally:
            await database.close()

    return asyncio.run(main())


async def rows(tx: Any, query: str, *values: object) -> list[dict[str, Any]]:
    asked = await tx.execute(query, values or None)
    return list(await asked.fetchall())


async def insert(tx: Any, table: str, **values: object) -> int:
    """Insert a row. Return its number, if the table has one."""
    fit = [json.dumps(value) if isinstance(value, dict) else value for value in values.values()]
    query = f"insert into hil.{table} ({', '.join(values)}) values ({', '.join(['%s'] * len(fit))}) returning *"
    row = (await rows(tx, query, *fit))[0]
    return int(row.get("id", 0))


async def board(tx: Any, name: str, **values: object) -> None:
    await insert(tx, "boards", **{"name": name, "card": {}, "state": "online", "host": "lab1", **values})


async def submission(tx: Any, jobs: int = 1, **values: object) -> int:
    usual = {"user_name": "ann", "title": "digits", "priority": "normal", "timeout_s": 60.0, "max_attempts": 3}
    return await insert(tx, "submissions", **{**usual, "key": f"key {values}", "jobs": jobs, **values})


async def job(tx: Any, submission: int, number: int = 1, **values: object) -> int:
    usual = {"kind": "run", "spec": {"kind": "run"}, "state": "queued"}
    return await insert(tx, "jobs", **{**usual, "submission": submission, "number": number, **values})


async def lease(tx: Any, job: int, board: str, *, over: bool = False, **values: object) -> int:
    (row,) = await rows(
        tx, "select now() as now, now() + interval '1 minute' as soon, count(*) + 1 as fence from hil.leases"
    )
    usual = {"worker": "w", "fence": row["fence"], "attempt": 1, "expires_at": row["soon"], "until": row["soon"]}
    ended_at = row["now"] if over else None
    return await insert(tx, "leases", **{**usual, "job": job, "board": board, "ended_at": ended_at, **values})

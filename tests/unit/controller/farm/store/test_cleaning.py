"""Test which old rows and files are deleted."""

from __future__ import annotations

import pytest
from support.farm_rows import board, insert, job, lease, rows, submission, with_tx

from hil.controller.farm.database.database import Tx
from hil.controller.farm.leasing.sweeper import delete_old
from hil.errors import StorageError

DAY = 86400.0
TABLES = (
    "submissions",
    "jobs",
    "leases",
    "results",
    "logs",
    "events",
    "boards",
    "artifacts",
    "audit",
    "shares",
    "reservations",
)


async def fill(tx: Tx) -> None:
    """Fill an old farm with old, new and waiting jobs, their files, and unreferenced files."""
    await board(tx, "pi")
    await board(tx, "gone", state="offline")
    await board(tx, "kept", state="offline", hold="draining")
    for title, days in (("old", 40), ("new", 1)):
        files = {"files": {"m.onnx": f"blake3:{title}"}}
        whole = await submission(tx, 2, key=title, title=title)
        for number in (1, 2):
            one = await job(tx, whole, number, state="done", spec={"kind": "run", **files})
            its = await lease(tx, one, "pi", over=True)
            made = {"files": {"out": f"blake3:{title}-out"}}
            await insert(tx, "results", job=one, lease=its, exit_code=0, result=made)
            await insert(tx, "logs", job=one, lease=its, text="x")
            age = f"now() - interval '{days} days'"
            await tx.execute(f"update hil.jobs set finished_at = {age} where id = {one}")
        await insert(tx, "events", what="job.done", job=title)
    waits = await submission(tx, key="waits", title="waits")
    await job(tx, waits, spec={"kind": "run", "files": {"m": "blake3:waits"}})
    half = await submission(tx, 2, key="half", title="half")
    await job(tx, half, 1, state="done")
    await job(tx, half, 2, state="running")
    for name in ("old", "old-out", "new", "new-out", "waits", "nobody's", "fresh"):
        await insert(tx, "artifacts", digest=f"blake3:{name}", size=10)
    await insert(tx, "audit", user_name="ann", role="admin", action="gc", allowed=True)
    await insert(tx, "shares", user_name="ann", board_s=1.0)
    for days in (40, -1):
        await tx.execute(
            "insert into hil.reservations (user_name, board, begins_at, ends_at)"
            f" values ('ann', 'pi', now() - interval '{days + 1} days', now() - interval '{days} days')"
        )
    await insert(tx, "shares", user_name="gone", board_s=1.0)
    long_ago = "now() - interval '40 days'"
    await tx.execute(f"update hil.shares set at = {long_ago} where user_name = 'gone'")
    await tx.execute(f"update hil.submissions set at = {long_ago} where title <> 'new'")
    await tx.execute(f"update hil.jobs set finished_at = {long_ago} where submission = {half} and number = 1")
    await tx.execute(f"update hil.events set at = {long_ago} where job = 'old'")
    await tx.execute(f"update hil.boards set added_at = {long_ago}")
    await tx.execute(f"update hil.audit set at = {long_ago}")
    await tx.execute(f"update hil.artifacts set used_at = {long_ago} where digest <> 'blake3:fresh'")


async def count(tx: Tx) -> dict[str, int]:
    return {name: (await rows(tx, f"select count(*) as n from hil.{name}"))[0]["n"] for name in TABLES}


DELETED = {
    "submissions": 1,
    "jobs": 2,
    "leases": 2,
    "results": 2,
    "logs": 2,
    "events": 1,
    "reservations": 1,
    "boards": 1,
    "artifacts": 3,
    "shares": 1,
    "messages": 0,
}


def test_gc_deletes_old_jobs_with_dependent_rows_and_files(farm_db: str) -> None:
    gone: list[str] = []

    async def delete(digests: list[str]) -> None:
        gone.extend(digests)

    async def work(tx: Tx) -> None:
        await fill(tx)
        before = await count(tx)
        done = await delete_old(tx, 30 * DAY, delete)
        after = await count(tx)
        assert done.counts == DELETED
        deleted = {name: number for name, number in DELETED.items() if name in TABLES}
        assert {name: before[name] - after[name] for name in TABLES} == {**deleted, "audit": 0}
        assert sorted(gone) == sorted(done.artifacts) == ["blake3:nobody's", "blake3:old", "blake3:old-out"]
        assert done.bytes == 30
        assert [row["name"] for row in await rows(tx, "select name from hil.boards order by name")] == ["kept", "pi"]
        assert (await delete_old(tx, 30 * DAY, delete)).counts == dict.fromkeys(DELETED, 0)

    with_tx(farm_db, work)


def test_gc_dry_run_counts_without_deleting(farm_db: str) -> None:
    async def never(digests: list[str]) -> None:
        raise AssertionError(digests)

    async def work(tx: Tx) -> None:
        await fill(tx)
        before = await count(tx)
        assert (await delete_old(tx, 30 * DAY, never, dry_run=True)).counts == DELETED
        assert await count(tx) == before

    with_tx(farm_db, work)


def test_gc_preserves_rows_when_file_deletion_fails(farm_db: str) -> None:
    async def fail(digests: list[str]) -> None:
        raise StorageError("the store is read-only")

    with_tx(farm_db, fill)
    before = with_tx(farm_db, count)
    with pytest.raises(StorageError):
        with_tx(farm_db, lambda tx: delete_old(tx, 30 * DAY, fail))
    assert with_tx(farm_db, count) == before


def test_foreign_keys_have_indexes(farm_db: str) -> None:
    """Without an index, each deleted row needs a scan of all rows that refer to it."""
    without = """
        select conrelid::regclass::text as its_table, conname from pg_constraint as key
        where contype = 'f' and connamespace = 'hil'::regnamespace and not exists (
            select from pg_index where indrelid = key.conrelid and indpred is null and indkey[0] = key.conkey[1])
    """
    assert with_tx(farm_db, lambda tx: rows(tx, without)) == []

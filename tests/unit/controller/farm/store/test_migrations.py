"""Test the database schema: created at once, created by steps, and upgraded with its data."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import psycopg
import pytest
from support.farm_desks import open_desk
from support.farm_rows import board, insert, job, lease, rows, submission, with_tx

from hil.controller.farm.database.database import SchemaPart, Tx, list_shipped_schemas, migrate
from hil.controller.farm.messages import Kind
from hil.errors import FarmError, UsageError

# The parts of a schema, without generated names.
CATALOG = """
    select 'column' as what, table_schema || '.' || table_name || '.' || column_name as name,
        concat_ws(' ', data_type, is_nullable, column_default) as is
    from information_schema.columns where table_schema in ('public', 'hil')
    union all
    select 'index', indexname, indexdef from pg_indexes where schemaname in ('public', 'hil')
    union all
    select 'trigger', tgname, pg_get_triggerdef(oid) from pg_trigger where not tgisinternal
    union all
    select 'enum', typname, string_agg(enumlabel, ' ' order by enumlabel) from pg_enum
        join pg_type on pg_type.oid = enumtypid group by typname
    union all
    select 'function', proname, pg_get_function_identity_arguments(oid) from pg_proc
        where pronamespace in ('public'::regnamespace, 'hil'::regnamespace)
    order by 1, 2
"""


def until(part: SchemaPart, last: str) -> SchemaPart:
    """Return a part as of its step ``last``, without the single-step schema."""
    return replace(part, steps={name: sql for name, sql in part.steps.items() if name <= last}, whole="")


def old(theirs: str = "02.14.01_01_add_indexes_for_fetch_job", ours: str = "0001_farm") -> tuple[SchemaPart, ...]:
    queue, farm = list_shipped_schemas()
    assert theirs in queue.steps and ours in farm.steps
    return until(queue, theirs), until(farm, ours)


def catalog(url: str) -> list[dict[str, Any]]:
    return with_tx(url, lambda tx: rows(tx, CATALOG))


@pytest.mark.ci
def test_migrate_creates_database_and_ignores_repeat(any_db: str) -> None:
    done = asyncio.run(migrate(any_db))
    assert done == [name for part in list_shipped_schemas() for name in part.steps]
    made = catalog(any_db)
    assert asyncio.run(migrate(any_db)) == []
    assert catalog(any_db) == made


def test_migrate_by_steps_matches_whole_schema(empty_db: str, farm_db: str) -> None:
    asyncio.run(migrate(empty_db, tuple(replace(part, whole="") for part in list_shipped_schemas())))
    ours = ("column", "index", "trigger", "function", "enum")
    stepwise, whole = catalog(empty_db), catalog(farm_db)
    assert {row["what"] for row in whole} == set(ours)

    def names(found: list[dict[str, Any]]) -> set[tuple[str, str]]:
        # Procrastinate's steps leave a few unused objects.
        return {(row["what"], row["name"]) for row in found}

    assert names(whole) <= names(stepwise)
    assert {row["name"] for row in stepwise if row["name"].startswith("hil.")} == {
        row["name"] for row in whole if row["name"].startswith("hil.")
    }


async def fill(tx: Tx) -> None:
    """Fill a busy farm at the first schema."""
    await board(tx, "pi", fence=2, worker="w", checked_at=datetime.now(timezone.utc))
    await board(tx, "jetson", state="quarantined", failures=2)
    done = await submission(tx, key="done")
    first = await job(tx, done, state="done", attempts=1, spec={"kind": "run", "affinity": "blake3:aa"})
    over = await lease(tx, first, "pi", over=True)
    await insert(tx, "results", job=first, lease=over, exit_code=0, outcome="PASS", result={"exit_code": 0})
    await insert(tx, "logs", job=first, lease=over, text="all is well\n")
    running = await submission(tx, key="running")
    second = await job(tx, running, state="running", attempts=1, spec={"kind": "run", "affinity": "blake3:bb"})
    active = await lease(tx, second, "pi")
    waiting = await submission(tx, 2, key="waiting", project="vision")
    await job(tx, waiting, 1, spec={"kind": "run", "affinity": "blake3:aa"})
    await job(tx, waiting, 2)
    for number in (1, 2):
        # The first schema allowed two checks of a board.
        checks = await submission(tx, key=f"check {number}", user_name="farm", board="jetson")
        await job(tx, checks, kind="health", spec={"kind": "health"})
    # Add queue jobs in the format of the old procrastinate.
    for number, status in ((over, "succeeded"), (active, "doing")):
        arguments = json.dumps({"lease": number, "board": "pi"})
        await tx.execute(
            "insert into procrastinate_jobs (queue_name, task_name, lock, args)"
            " values ('board:pi', 'hil.lease', 'pi', %s)",
            [arguments],
        )
        await tx.execute("update procrastinate_jobs set status = %s where status = 'todo'", [status])
    await tx.execute("update hil.leases set queue_id = (select id from procrastinate_jobs where status = 'doing')")
    await insert(tx, "tokens", digest="d", user_name="ann", role="submitter")
    await insert(tx, "audit", user_name="ann", role="submitter", action="Submit", allowed=True)
    await insert(tx, "events", what="board.quarantined", board="jetson")


TABLES = ("boards", "submissions", "jobs", "leases", "results", "logs", "events", "audit", "tokens")


async def contents(tx: Tx) -> dict[str, list[dict[str, Any]]]:
    found = {
        name: await rows(tx, f"select to_jsonb(t) as row from hil.{name} as t order by t::text") for name in TABLES
    }
    queue = (
        "select jsonb_build_object('id', id, 'status', status, 'args', args) as row from procrastinate_jobs order by id"
    )
    return {**found, "queue": await rows(tx, queue)}


def test_migrate_preserves_data_of_older_farm(any_db: str) -> None:
    asyncio.run(migrate(any_db, old()))
    with_tx(any_db, fill)
    before = with_tx(any_db, contents)
    done = asyncio.run(migrate(any_db))
    assert done[0].startswith("03.00.00_01") and done[-1] == list(list_shipped_schemas()[1].steps)[-1]
    after = with_tx(any_db, contents)
    for table, had in before.items():
        kept = [{key: value for key, value in one["row"].items() if key in had[0]["row"]} for one in after[table]]
        assert sorted(map(str, kept)) == sorted(str(one["row"]) for one in had), table
    jobs = with_tx(
        any_db, lambda tx: rows(tx, "select affinity, lane <> '' as laned, checks from hil.jobs order by id")
    )
    assert [row["affinity"] for row in jobs] == ["blake3:aa", "blake3:bb", "blake3:aa", "", "", ""]
    assert all(row["laned"] for row in jobs)
    assert [row["checks"] for row in jobs] == [None] * 5 + ["jetson"]
    boards = with_tx(any_db, lambda tx: rows(tx, "select name, warm from hil.boards order by name"))
    assert boards == [{"name": "jetson", "warm": []}, {"name": "pi", "warm": ["blake3:aa"]}]


def test_migrated_farm_finishes_running_and_waiting_jobs(any_db: str) -> None:
    asyncio.run(migrate(any_db, old()))
    with_tx(any_db, fill)
    asyncio.run(migrate(any_db))
    with open_desk(any_db) as desk:
        active = desk.grant("pi")
        assert (active.job, active.fence) == ("2", 2)
        assert desk.attend("pi", "w", [active.lease]).owner
        assert desk.report(active) == (True, "")
        for name in ("3.1", "3.2"):
            granted = desk.grant("pi")
            assert granted.job == name and granted.fence > active.fence
            # The old procrastinate created this queue.
            assert desk.fetched("pi") == [granted.lease]
            assert desk.report(granted) == (True, "")
        assert desk.jobs() == {"1": "done", "2": "done", "3.1": "done", "3.2": "done", "4": "queued"}
        assert [row["args"]["lease"] for row in desk.rows("select args from procrastinate_jobs")] == [1]
        desk.attend("jetson", "w2")
        check = desk.grant("jetson")
        assert check.spec.kind is Kind.HEALTH
        assert desk.report(check) == (True, "")
        assert desk.board("jetson")["state"] == "online"


@pytest.mark.parametrize(
    "version", ["00.00.00_01_initial", "01.01.01_01_job_id_bigint", "03.02.00_50_post_batch_defer_jobs"]
)
def test_migrate_upgrades_procrastinate_from_any_version(empty_db: str, version: str) -> None:
    asyncio.run(migrate(empty_db, old(version)))
    done = asyncio.run(migrate(empty_db))
    assert [name for name in done if name.startswith("0") and "." in name] == [
        name for name in list_shipped_schemas()[0].steps if name > version
    ]


@pytest.mark.parametrize("part", ["procrastinate", "hil"])
def test_migrate_rejects_newer_database(farm_db: str, part: str) -> None:
    with_tx(farm_db, lambda tx: insert(tx, "migrations", part=part, name="99_future"))
    made = catalog(farm_db)
    with pytest.raises(FarmError, match=f"newer than this hil: it contains the {part} migration 99_future") as caught:
        asyncio.run(migrate(farm_db))
    assert "pip install --upgrade" in caught.value.hint
    assert catalog(farm_db) == made


@pytest.mark.parametrize(
    ("table", "whose"), [("procrastinate_jobs (id int)", "procrastinate"), ("hil.jobs (id int)", "hil")]
)
def test_migrate_rejects_foreign_tables(empty_db: str, table: str, whose: str) -> None:
    async def make(tx: Tx) -> None:
        await tx.execute("create schema hil")
        await tx.execute(f"create table {table}")

    with_tx(empty_db, make)
    with pytest.raises(FarmError, match=f"{whose} tables that hil did not create"):
        asyncio.run(migrate(empty_db))


def test_migrate_runs_for_single_concurrent_caller(empty_db: str) -> None:
    async def main() -> list[list[str]]:
        return await asyncio.gather(*[migrate(empty_db) for _ in range(5)])

    done = asyncio.run(main())
    assert sorted(map(len, done)) == [0] * 4 + [sum(len(part.steps) for part in list_shipped_schemas())]


def test_migrate_resumes_after_failed_step(empty_db: str) -> None:
    queue, farm = list_shipped_schemas()
    broken = replace(farm, steps={**farm.steps, "0003_lanes": "create table hil.half (id int); select 1 / 0"})
    with pytest.raises(psycopg.errors.DivisionByZero):
        asyncio.run(migrate(empty_db, (queue, broken)))
    half = with_tx(empty_db, lambda tx: rows(tx, "select to_regclass('hil.half') as it"))
    assert half == [{"it": None}]
    assert asyncio.run(migrate(empty_db)) == [name for name in farm.steps if name >= "0003_lanes"]


def test_migration_steps_are_numbered_without_gaps() -> None:
    names = list(list_shipped_schemas()[1].steps)
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))


def test_migrate_reports_impossible_fence_and_forget_resets(any_db: str) -> None:
    asyncio.run(migrate(any_db, old()))
    with_tx(any_db, fill)

    async def brick(tx: Tx) -> None:
        await tx.execute("update hil.boards set fence = %s, worker = '', state = 'offline'", [2**62 - 1])

    with_tx(any_db, brick)
    asyncio.run(migrate(any_db))
    with open_desk(any_db) as desk:
        assert "invalid stored fence" in desk.board("pi")["reason"]
        assert ("board.fence", f"invalid stored fence {2**62 - 1}: reset it with hil farm forget pi") in (
            desk.events(board="pi")
        )
        with pytest.raises(UsageError, match="invalid stored fence of pi") as refused:
            desk.attend("pi", "w2")
        assert "hil farm forget pi" in refused.value.hint
        [highest] = desk.rows("select max(fence) as fence from hil.leases where board = 'pi'")
        desk.forget("pi")
        assert f"reset to {highest['fence']}" in desk.events(board="pi")[-1][1]
        # The fence seen by the agent counts too: the agent rejects lower ones.
        desk.attend("pi", "w2", fence=40)
        assert desk.board("pi")["fence"] >= 40

"""The schema: made whole, made step by step, and brought up to date with everything that is in it."""

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

from hil.controller.farm.messages import Kind
from hil.controller.farm.store.database import Part, Tx, migrate, shipped
from hil.errors import FarmError, UsageError

# What makes up a schema, but for names that say nothing.
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


def until(part: Part, last: str) -> Part:
    """A part as it was when ``last`` was its newest step; without a short way."""
    return replace(part, steps={name: sql for name, sql in part.steps.items() if name <= last}, whole="")


def old(theirs: str = "02.14.01_01_add_indexes_for_fetch_job", ours: str = "0001_farm") -> tuple[Part, ...]:
    queue, farm = shipped()
    assert theirs in queue.steps and ours in farm.steps
    return until(queue, theirs), until(farm, ours)


def catalog(url: str) -> list[dict[str, Any]]:
    return with_tx(url, lambda tx: rows(tx, CATALOG))


def test_a_new_database_is_made_and_then_left_alone(any_db: str) -> None:
    done = asyncio.run(migrate(any_db))
    assert done == [name for part in shipped() for name in part.steps]
    made = catalog(any_db)
    assert asyncio.run(migrate(any_db)) == []
    assert catalog(any_db) == made


def test_step_by_step_comes_to_the_same_schema(empty_db: str, farm_db: str) -> None:
    asyncio.run(migrate(empty_db, tuple(replace(part, whole="") for part in shipped())))
    ours = ("column", "index", "trigger", "function", "enum")
    stepwise, whole = catalog(empty_db), catalog(farm_db)
    assert {row["what"] for row in whole} == set(ours)

    def names(found: list[dict[str, Any]]) -> set[tuple[str, str]]:
        # Procrastinate's own steps leave a few things behind that nothing uses.
        return {(row["what"], row["name"]) for row in found}

    assert names(whole) <= names(stepwise)
    assert {row["name"] for row in stepwise if row["name"].startswith("hil.")} == {
        row["name"] for row in whole if row["name"].startswith("hil.")
    }


async def fill(tx: Tx) -> None:
    """A farm in the middle of its work, at the first schema."""
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
        # Nothing kept two checks of a board apart then.
        checks = await submission(tx, key=f"check {number}", user_name="farm", board="jetson")
        await job(tx, checks, kind="health", spec={"kind": "health"})
    # The queue's jobs as procrastinate deferred and fetched them in those days.
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


def test_an_older_farm_is_upgraded_with_all_that_is_in_it(any_db: str) -> None:
    asyncio.run(migrate(any_db, old()))
    with_tx(any_db, fill)
    before = with_tx(any_db, contents)
    done = asyncio.run(migrate(any_db))
    assert done[0].startswith("03.00.00_01") and done[-1] == list(shipped()[1].steps)[-1]
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


def test_what_ran_and_what_waited_is_done_after_an_upgrade(any_db: str) -> None:
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
            # It comes by the queue that an older procrastinate made.
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
def test_procrastinate_is_upgraded_from_any_version(empty_db: str, version: str) -> None:
    asyncio.run(migrate(empty_db, old(version)))
    done = asyncio.run(migrate(empty_db))
    assert [name for name in done if name.startswith("0") and "." in name] == [
        name for name in shipped()[0].steps if name > version
    ]


@pytest.mark.parametrize("part", ["procrastinate", "hil"])
def test_a_newer_database_is_left_alone(farm_db: str, part: str) -> None:
    with_tx(farm_db, lambda tx: insert(tx, "migrations", part=part, name="99_future"))
    made = catalog(farm_db)
    with pytest.raises(FarmError, match=f"newer than this program: it has {part}'s 99_future") as caught:
        asyncio.run(migrate(farm_db))
    assert "pip install --upgrade" in caught.value.hint
    assert catalog(farm_db) == made


@pytest.mark.parametrize(
    ("table", "whose"), [("procrastinate_jobs (id int)", "procrastinate"), ("hil.jobs (id int)", "hil")]
)
def test_somebody_elses_tables_are_not_taken_over(empty_db: str, table: str, whose: str) -> None:
    async def make(tx: Tx) -> None:
        await tx.execute("create schema hil")
        await tx.execute(f"create table {table}")

    with_tx(empty_db, make)
    with pytest.raises(FarmError, match=f"{whose}'s tables, but no farm made them"):
        asyncio.run(migrate(empty_db))


def test_of_several_who_migrate_at_once_one_does_it(empty_db: str) -> None:
    async def main() -> list[list[str]]:
        return await asyncio.gather(*[migrate(empty_db) for _ in range(5)])

    done = asyncio.run(main())
    assert sorted(map(len, done)) == [0] * 4 + [sum(len(part.steps) for part in shipped())]


def test_what_was_cut_off_goes_on_where_it_was(empty_db: str) -> None:
    queue, farm = shipped()
    broken = replace(farm, steps={**farm.steps, "0003_lanes": "create table hil.half (id int); select 1 / 0"})
    with pytest.raises(psycopg.errors.DivisionByZero):
        asyncio.run(migrate(empty_db, (queue, broken)))
    half = with_tx(empty_db, lambda tx: rows(tx, "select to_regclass('hil.half') as it"))
    assert half == [{"it": None}]
    assert asyncio.run(migrate(empty_db)) == [name for name in farm.steps if name >= "0003_lanes"]


def test_every_step_of_ours_is_numbered_without_gaps() -> None:
    names = list(shipped()[1].steps)
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))


def test_a_fence_that_locks_a_board_out_is_told_and_mended_by_forgetting_the_board(any_db: str) -> None:
    asyncio.run(migrate(any_db, old()))
    with_tx(any_db, fill)

    async def brick(tx: Tx) -> None:
        await tx.execute("update hil.boards set fence = %s, worker = '', state = 'offline'", [2**62 - 1])

    with_tx(any_db, brick)
    asyncio.run(migrate(any_db))
    with open_desk(any_db) as desk:
        assert "makes no sense" in desk.board("pi")["reason"]
        assert ("board.fence", f"its stored fence, {2**62 - 1}, makes no sense: hil farm forget pi mends it") in (
            desk.events(board="pi")
        )
        with pytest.raises(UsageError, match="the fence that the farm has kept of pi makes no sense") as refused:
            desk.attend("pi", "w2")
        assert "hil farm forget pi" in refused.value.hint
        [highest] = desk.rows("select max(fence) as fence from hil.leases where board = 'pi'")
        desk.forget("pi")
        assert f"goes on after {highest['fence']}" in desk.events(board="pi")[-1][1]
        # What the agent has seen counts too: it refuses what is not above it.
        desk.attend("pi", "w2", fence=40)
        assert desk.board("pi")["fence"] >= 40

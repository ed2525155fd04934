"""Test the queries of a farm and validate each answer against docs/farm.schema.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support.farm_rows import board, insert, job, lease, submission, with_tx
from support.farms import Server, fresh
from support.schemas import check_document

from hil.controller.farm.database.database import Tx
from hil.controller.farm.messages import JobResult, Principal, Role
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store import case_results, queries
from hil.controller.records.base import make_record
from hil.errors import UsageError


async def ask(tx: Tx, what: str, **arguments: Any) -> Any:
    answer = msgspec.to_builtins(await queries.ask(tx, what, arguments, FarmSettings()))
    check_document(answer, what, "farm")
    return answer


async def fill(tx: Tx) -> None:
    """Fill two boards, a suite of two jobs (one done at the second attempt, one running), a queued and a health job."""
    await board(tx, "pi", site="lab", hw_type="rpi", labels=json.dumps({"chip": "a72"}))
    await board(tx, "jetson", state="suspect", reason="an error")
    await board(tx, "old", hold="draining", hold_reason="drained by ann: fan")
    suite = await submission(tx, 2, project="vision", selector="chip=a72", priority="high")
    first = await job(tx, suite, 1, kind="suite", state="done", attempts=2)
    await tx.execute(
        "update hil.jobs set started_at = queued_at + interval '4 s', finished_at = queued_at where id = 1"
    )
    failed = await lease(tx, first, "jetson", over=True, reason="the board was lost")
    good = await lease(tx, first, "pi", over=True, attempt=2)
    result = JobResult(1, "FAIL", "6 of 10 differ", files={"report.json": "blake3:00"})
    await insert(tx, "results", job=first, lease=good, exit_code=1, outcome="FAIL", result=result.to_json())
    await insert(tx, "logs", job=first, lease=failed, text="begun\n")
    second = await job(tx, suite, 2, kind="suite", state="running", attempts=1)
    await lease(tx, second, "pi")
    alone = await submission(tx, user_name="bob", key="b")
    await job(tx, alone)
    checks = await submission(tx, user_name="farm", key="c", board="jetson")
    await job(tx, checks, kind="health")
    await insert(tx, "events", what="board.suspect", board="jetson", reason="an error")
    await insert(tx, "events", what="job.queued", job="1.1")
    await insert(tx, "audit", user_name="bob", role="viewer", action="drain", allowed=False, detail={"reason": "no"})


@pytest.fixture(scope="module")
def farm(database_server: Server) -> Iterator[str]:
    with fresh(database_server, database_server.make_farm) as url:
        with_tx(url, fill)
        yield url


def asked(farm: str, what: str, **arguments: Any) -> Any:
    return with_tx(farm, lambda tx: ask(tx, what, **arguments))


def test_jobs_include_board_and_result(farm: str) -> None:
    first, second, alone = asked(farm, "jobs")
    assert (first["name"], first["board"], first["state"], first["exit_code"]) == ("1.1", "pi", "done", 1)
    assert (first["outcome"], first["reason"], first["project"]) == ("FAIL", "6 of 10 differ", "vision")
    assert (second["name"], second["board"], second["state"], second["exit_code"]) == ("1.2", "pi", "running", None)
    assert (alone["name"], alone["user"], alone["board"], alone["state"]) == ("2", "bob", "", "queued")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"state": ["queued"]}, ["2"]),
        ({"state": ["queued", "done"]}, ["1.1", "2"]),
        ({"user": "bob"}, ["2"]),
        ({"user": "nobody"}, []),
        ({"submission": 1}, ["1.1", "1.2"]),
        ({"submission": 3}, ["3"]),
        ({"limit": 2}, ["1.2", "2"]),
        ({"health": True}, ["1.1", "1.2", "2", "3"]),
        ({"before": "2"}, ["1.1", "1.2"]),
        ({"before": "1.2"}, ["1.1"]),
        ({"before": "1"}, []),
        ({"before": "99999999999999999999"}, ["1.1", "1.2", "2"]),
    ],
)
def test_jobs_filter_by_arguments(farm: str, arguments: dict[str, Any], names: list[str]) -> None:
    assert [one["name"] for one in asked(farm, "jobs", **arguments)] == names


@pytest.mark.parametrize(
    ("arguments", "count"),
    [({}, 3), ({"state": ["queued"]}, 1), ({"user": "bob"}, 1), ({"user": "bob", "state": ["done"]}, 0)],
)
def test_stats_count_matching_jobs(farm: str, arguments: dict[str, Any], count: int) -> None:
    assert asked(farm, "stats", **arguments)["matching"] == count == len(asked(farm, "jobs", **arguments))
    with pytest.raises(UsageError, match="unknown job state 'gone'"):
        asked(farm, "stats", state=["gone"])


def test_jobs_of_submission_have_separate_titles(farm: str) -> None:
    async def named(tx: Tx) -> None:
        await tx.execute("update hil.jobs set title = 'nets' where submission = 1 and number = 2")

    with_tx(farm, named)
    assert [one["title"] for one in asked(farm, "jobs", submission=1)] == ["digits", "nets"]


def test_job_lists_attempts(farm: str) -> None:
    said = asked(farm, "job", name="1.1")
    assert [(one["board"], one["fence"], one["reason"]) for one in said["attempts_made"]] == [
        ("jetson", 1, "the board was lost"),
        ("pi", 2, ""),
    ]
    assert asked(farm, "job", name="2")["attempts_made"] == []


def test_job_rejects_submission_of_multiple_jobs(farm: str) -> None:
    with pytest.raises(UsageError, match=r"1 has 2 jobs[^$]*1\.1 to 1\.2"):
        asked(farm, "job", name="1")


@pytest.mark.parametrize("name", ["7", "1.3", "2.2", "x", "", "1.", "99999999999999999999", "1.99999999999"])
@pytest.mark.parametrize("what", ["job", "result", "logs"])
def test_queries_reject_unknown_job(farm: str, what: str, name: str) -> None:
    with pytest.raises(UsageError, match=r"job .* not found|invalid job name"):
        asked(farm, what, name=name)


def test_result_returns_finished_jobs(farm: str) -> None:
    first, second = asked(farm, "result", name="1")
    assert make_record(first, JobResult) == JobResult(1, "FAIL", "6 of 10 differ", files={"report.json": "blake3:00"})
    assert second == {"name": "1.2", "state": "running"}
    assert asked(farm, "result", name="1.1") == [first]


def test_result_rejects_response_above_limit(farm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "_MOST_RESULTS", 10)
    with pytest.raises(UsageError, match="the limit is"):
        with_tx(farm, lambda tx: ask(tx, "result", name="1", specs=True))
    assert len(with_tx(farm, lambda tx: ask(tx, "result", name="1.1"))) == 1


@pytest.mark.parametrize("page", [1, 2, 3])
def test_jobs_are_read_in_pages(farm: str, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = with_tx(farm, lambda tx: ask(tx, "jobs", health=True))
    monkeypatch.setattr(queries, "_PAGE", page)
    assert with_tx(farm, lambda tx: ask(tx, "jobs", health=True)) == whole
    assert with_tx(farm, lambda tx: ask(tx, "jobs", health=True, limit=2)) == whole[-2:]
    assert len(with_tx(farm, lambda tx: ask(tx, "result", name="1"))) == 2


def test_boards_show_user_job_and_state(farm: str) -> None:
    jetson, old, pi = asked(farm, "boards")
    assert (pi["state"], pi["job"], pi["user"], pi["labels"]) == ("online", "1.2", "ann", {"chip": "a72"})
    assert pi["since"] is not None
    assert (jetson["state"], jetson["reason"], jetson["job"], jetson["since"]) == ("suspect", "an error", "", None)
    assert old["state"] == "maintenance"


def test_boards_show_busy_held_board_as_draining(farm_db: str) -> None:
    async def drain(tx: Tx) -> None:
        await fill(tx)
        await tx.execute("update hil.boards set hold = 'draining' where name = 'pi'")

    with_tx(farm_db, drain)
    assert [one["state"] for one in asked(farm_db, "boards")] == ["suspect", "maintenance", "draining"]
    assert asked(farm_db, "stats")["boards"]["draining"] == 1


def test_events_filter_by_board_and_job(farm: str) -> None:
    assert [one["what"] for one in asked(farm, "events")] == ["board.suspect", "job.queued"]
    assert [one["what"] for one in asked(farm, "events", board="jetson")] == ["board.suspect"]
    assert [one["what"] for one in asked(farm, "events", job="1.1")] == ["job.queued"]
    assert [one["what"] for one in asked(farm, "events", limit=1)] == ["job.queued"]


def test_audit_returns_entries(farm: str) -> None:
    (one,) = asked(farm, "audit")
    assert (one["user"], one["action"], one["allowed"], one["detail"]) == ("bob", "drain", False, {"reason": "no"})


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"failed": True}, ["1.1"]),
        ({"failed": True, "user": "bob"}, []),
        ({"failed": True, "state": ["queued"]}, []),
        ({"since": 1.0}, ["1.1", "1.2", "2"]),
        ({"since": 9e10}, []),
    ],
)
def test_jobs_and_stats_select_failed_and_recent_jobs(farm: str, arguments: dict[str, Any], names: list[str]) -> None:
    assert [job["name"] for job in asked(farm, "jobs", **arguments)] == names
    assert asked(farm, "stats", **arguments)["matching"] == len(names)


@pytest.mark.parametrize("since", [-1.0, 1e12, float("nan"), float("inf")])
def test_jobs_reject_invalid_time(farm: str, since: float) -> None:
    with pytest.raises(UsageError, match="invalid time"):
        asked(farm, "jobs", since=since)


def test_stats_summarize_farm(farm: str) -> None:
    said = asked(farm, "stats")
    assert said["jobs"] == {"queued": 1, "running": 1, "done": 1, "cancelled": 0}
    assert {state: count for state, count in said["boards"].items() if count} == {
        "online": 1,
        "suspect": 1,
        "maintenance": 1,
    }
    assert said["queue"] == {"high": 0, "normal": 1, "low": 0}
    assert said["waiting_s"]["p50"] == pytest.approx(4.0)
    assert [(one["user"], one["project"], one["running"], one["queued"]) for one in said["users"]] == [
        ("ann", "vision", 1, 0),
        ("bob", "", 0, 1),
    ]


def test_stats_decay_usage_by_half_life(farm_db: str) -> None:
    async def used(tx: Tx) -> list[float]:
        await tx.execute("insert into hil.shares values ('ann', '', 1000.0, now() - interval '100 s')")
        settings = [FarmSettings(share_half_life_s=seconds) for seconds in (100.0, 200.0)]
        return [(await queries.stats(tx, one)).users[0].board_s for one in settings]

    assert with_tx(farm_db, used) == pytest.approx([500.0, 1000.0 / 2**0.5], rel=0.01)


def test_queue_shows_position_and_reason(farm_db: str) -> None:
    async def more(tx: Tx) -> list[dict[str, Any]]:
        await fill(tx)
        await job(tx, await submission(tx, user_name="bob", selector="gpu", key="d"))
        await job(tx, await submission(tx, user_name="bob", priority="high", key="e"))
        await tx.execute("update hil.jobs set lane = id::text")
        found = await ask(tx, "queue")
        assert [one["name"] for one in await ask(tx, "queue", limit=1)] == [found[0]["name"]]
        assert await ask(tx, "queue", jobs=["2.1", "4", "9"], limit=1) == found[1:]
        assert await ask(tx, "queue", jobs=["2.2"]) == []
        await tx.rollback()
        return found

    first, second, hopeless = with_tx(farm_db, more)
    assert (first["priority"], first["position"]) == ("high", 1)
    assert first["why"] == "jetson, pi are offline; old is drained by ann: fan"
    assert (second["name"], second["position"], second["user"]) == ("2", 2, "bob")
    assert second["why"] == "jetson, pi are offline; old is drained by ann: fan; 1 job ahead"
    assert (hopeless["selector"], hopeless["position"]) == ("gpu", 0)
    assert hopeless["why"].startswith("no board matches; ")


def test_me_returns_caller(farm_db: str) -> None:
    who = Principal("ann", Role.SUBMITTER, "vision")
    said = msgspec.to_builtins(with_tx(farm_db, lambda tx: queries.ask(tx, "me", {}, FarmSettings(), who)))
    check_document(said, "me", "farm")
    assert said == {"user": "ann", "role": "submitter", "project": "vision", "rights": [], "groups": []}


def test_queries_succeed_on_empty_farm(farm_db: str) -> None:
    for what in ("jobs", "boards", "events", "audit", "tokens", "queue"):
        assert asked(farm_db, what) == []
    assert asked(farm_db, "stats")["waiting_s"] == {"p50": None, "p95": None}


def test_logs_return_job_output(farm: str) -> None:
    (one,) = asked(farm, "logs", name="1")
    assert (one["job"], one["text"]) == ("1.1", "begun\n")
    assert asked(farm, "logs", name="1.1", after=one["number"]) == []


def test_cases_show_live_results_then_final_record(farm_db: str) -> None:
    async def work(tx: Tx) -> None:
        await fill(tx)
        assert await ask(tx, "cases", name="1") == {"total": 0, "cases": []}
        await case_results.keep(tx, 3, [("a", "PASS", ""), ("b", "FAIL", "wrong"), ("c\0", "PASS", "\ud800")])
        await case_results.keep(tx, 3, [("a", "XFAIL", "x" * 1000), ("a", "PASS", "")])
        await case_results.keep(tx, 2, [("over", "PASS", "")])
        await case_results.keep(tx, 99, [("nobody's", "PASS", "")])
        said = await ask(tx, "cases", name="1.2")
        assert [(one["name"], one["outcome"], one["reason"]) for one in said["cases"]] == [
            ("b", "FAIL", "wrong"), ("a", "PASS", ""), ("c\ufffd", "PASS", "?")
        ]  # fmt: skip
        assert {one["job"] for one in said["cases"]} == {"1.2"}
        first = await ask(tx, "cases", name="1", limit=1)
        assert (first["total"], [one["name"] for one in first["cases"]]) == (3, ["b"])
        await case_results.forget(tx, 3)
        assert (await ask(tx, "cases", name="1"))["total"] == 0
        ended = [{"id": "q", "outcome": "PASS", "message": "m"}, {"name": "n", "outcome": "FAIL", "reason": "r"}]
        for cases in (ended, None, 1, {}, "x", [1, None, [], {}, {"outcome": 3, "id": [], "message": {}}]):
            await tx.execute("update hil.results set result = %s", [json.dumps({"record": {"cases": cases}})])
            found = (await ask(tx, "cases", name="1"))["cases"]
            if cases is ended:
                told = [("1.1", "n", "FAIL", "r"), ("1.1", "q", "PASS", "m")]
                assert [(one["job"], one["name"], one["outcome"], one["reason"]) for one in found] == told
        await tx.execute("update hil.results set result = 'null'")
        assert (await ask(tx, "cases", name="1"))["total"] == 0
        await tx.rollback()

    with_tx(farm_db, work)


@pytest.mark.parametrize(
    ("what", "arguments", "said"),
    [
        ("jobs", {"limit": 0}, "limit must be a number"),
        ("jobs", {"limit": 200_000}, "limit must be a number"),
        ("jobs", {"state": ["lost"]}, "'lost'"),
        ("job", {"name": ""}, "invalid job name"),
        ("jobs", {"user": "a\0"}, "unknown user"),
        ("events", {"board": "\ud800"}, "unknown board"),
    ],
)
def test_queries_reject_invalid_arguments(farm: str, what: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        asked(farm, what, **arguments)

"""Test the farm's invariants: hypothesis runs random operations on a real database."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from support.farm_desks import ANNA, BERT, BROKEN, PASSED, Desk, open_desk

from hil.controller.farm.messages import JobResult, Kind
from hil.controller.farm.selector import parse

CHIPS = {"a": "a53", "b": "a53", "c": "m4"}
NAMES = st.sampled_from(sorted(CHIPS))
HOSTS = st.sampled_from(["north", "south"])
RESULTS = st.sampled_from([PASSED, JobResult(1, "FAIL", "differs"), JobResult(3, "TIMEOUT"), BROKEN])
ANY = st.integers(min_value=0)
_TABLES = ("results", "logs", "leases", "jobs", "submissions", "boards", "events", "shares")


class Farm(RuleBasedStateMachine):
    """Farm with three boards, each reachable from two hosts."""

    desk: Desk

    def __init__(self) -> None:
        super().__init__()
        for table in _TABLES:
            self.desk.rows(f"delete from hil.{table}")
        self.desk.rows("delete from procrastinate_jobs")
        self.final: dict[int, Any] = {}
        self.desk.attend("a", "north a 0", host="north", labels={"chip": CHIPS["a"]})

    @rule(
        count=st.integers(1, 4),
        selector=st.sampled_from(["", "chip=a53", "!chip or chip=m4", "name=a"]),
        attempts=st.integers(1, 3),
        who=st.sampled_from([ANNA, BERT]),
        priority=st.sampled_from(["high", "normal", "low"]),
    )
    def submit(self, selector: str, count: int, attempts: int, who: Any, priority: str) -> None:
        known = [row["labels"] for row in self.desk.rows("select labels from hil.boards")]
        if any(parse(selector).matches(labels) for labels in known):
            self.desk.submit(count, who, selector=selector, max_attempts=attempts, priority=priority)

    @rule()
    def submit_lease(self) -> None:
        self.desk.submit(kind=Kind.LEASE)

    @rule(board=NAMES, host=HOSTS, again=st.booleans(), knows=st.booleans())
    def attend(self, board: str, host: str, again: bool, knows: bool) -> None:
        """Connect a new worker, or reconnect the board's worker with or without its lease."""
        found = self.desk.rows("select worker, host from hil.boards where name = %s and worker <> ''", board)
        worker, held = f"{host} {board} {self.desk.number()}", []
        if again and found:
            worker, host = found[0]["worker"], found[0]["host"]
            held = [one.lease for one in self.desk.grants() if one.board == board] if knows else []
        attendance = self.desk.attend(board, worker, held, host=host, labels={"chip": CHIPS[board]})
        assert attendance.owner == (self.desk.board(board)["worker"] == worker)
        assert not attendance.over or not attendance.owner

    @rule(board=NAMES)
    def leave(self, board: str) -> None:
        for row in self.desk.rows("select worker from hil.boards where name = %s and worker <> ''", board):
            self.desk.leave(board, row["worker"])

    @rule(board=NAMES, stranger=st.booleans())
    def beat(self, board: str, stranger: bool) -> None:
        held = [one.lease for one in self.desk.grants() if one.board == board]
        for row in self.desk.rows("select worker from hil.boards where name = %s", board):
            beat = self.desk.beat(board, held, "a stranger" if stranger else row["worker"] or "nobody")
            assert beat.owner == (not stranger and row["worker"] != "")
            assert set(beat.over) == (set(held) if not beat.owner else set())
            # A board that was silent too long serves again after a tick.
            self.desk.tick()

    @precondition(lambda self: self.active())
    @rule(which=ANY)
    def started(self, which: int) -> None:
        self.desk.started(self.pick(which))

    @precondition(lambda self: self.active())
    @rule(which=ANY, result=RESULTS, twice=st.booleans(), fence=st.integers(0, 30))
    def report(self, which: int, result: JobResult, twice: bool, fence: int) -> None:
        lease = self.pick(which)
        for _ in range(1 + twice):
            assert self.desk.report(lease, result, fence=fence) == (True, "")

    @rule(which=ANY)
    def report_late(self, which: int) -> None:
        over = self.desk.rows("select id from hil.leases where ended_at is not null and result is null order by id")
        if over:
            recorded, reason = self.desk.report(over[which % len(over)]["id"])
            assert not recorded
            assert "ended" in reason

    @rule(which=ANY)
    def cancel(self, which: int) -> None:
        jobs = self.desk.jobs()
        if jobs:
            name = list(jobs)[which % len(jobs)]
            assert self.desk.cancel(name) == ([name] if jobs[name] in ("queued", "running") else [])

    @rule(board=NAMES)
    def fall_silent(self, board: str) -> None:
        self.desk.silence(board)

    @precondition(lambda self: self.active())
    @rule(which=ANY, column=st.sampled_from(["expires_at", "until", "holder_until"]))
    def time_runs_out(self, which: int, column: str) -> None:
        lease = self.pick(which)
        if self.desk.lease(lease)[column] is not None:
            self.desk.rows(f"update hil.leases set {column} = now() - interval '1 s' where id = %s", lease)

    @rule(board=NAMES)
    def quarantine_ends(self, board: str) -> None:
        self.desk.rows("update hil.boards set check_at = now() where name = %s and state = 'quarantined'", board)

    @rule(board=NAMES)
    def check_grows_old(self, board: str) -> None:
        self.desk.rows("update hil.boards set checked_at = now() - interval '9 days' where name = %s", board)

    @precondition(lambda self: self.desk.rows("select from hil.boards where name = 'a'"))
    @rule()
    def drain(self) -> None:
        self.desk.drain("a")

    @precondition(lambda self: self.desk.rows("select from hil.boards where name = 'a'"))
    @rule()
    def resume(self) -> None:
        self.desk.resume("a")

    @rule()
    def tick(self) -> None:
        self.desk.tick()
        unheard = self.desk.rows(
            "select from hil.leases where ended_at is null and"
            " (expires_at < now() or until < now() or holder_until < now())"
        )
        assert not unheard
        assert not self.desk.rows("select from hil.boards where worker <> '' and owned_until < now()")
        assert not self.forgotten(avoiding=True)
        unchecked = self.desk.rows(
            "select name from hil.boards as board where state = 'suspect' and hold = '' and worker <> ''"
            " and not exists (select from hil.jobs where checks = board.name and state in ('queued', 'running'))"
        )
        assert not unchecked

    @invariant()
    def promises_are_kept(self) -> None:
        jobs = {row["id"]: row for row in self.desk.rows(
            "select job.*, submission.max_attempts from hil.jobs as job"
            " join hil.submissions as submission on submission.id = job.submission"
        )}  # fmt: skip
        leases = self.desk.rows("select * from hil.leases order by id")
        active = [lease for lease in leases if lease["ended_at"] is None]
        assert len({lease["board"] for lease in active}) == len(active)
        assert len({lease["job"] for lease in active}) == len(active)
        assert {lease["job"] for lease in active} == {id for id, job in jobs.items() if job["state"] == "running"}
        for board in {lease["board"] for lease in leases}:
            fences = [lease["fence"] for lease in leases if lease["board"] == board]
            assert fences == sorted(set(fences))
            assert fences[-1] <= self.desk.board(board)["fence"]
        for job in jobs.values():
            # A lease that a planned stop of a host interrupted does not count as an attempt.
            assert job["attempts"] <= len([lease for lease in leases if lease["job"] == job["id"]])
            assert job["attempts"] <= job["max_attempts"]
        results = {row["job"]: row["result"] for row in self.desk.rows("select * from hil.results")}
        assert set(results) == {id for id, job in jobs.items() if job["state"] in ("done", "cancelled")}
        assert self.final.items() <= results.items()
        self.final = results
        checks = [job["checks"] for job in jobs.values() if job["checks"] and job["state"] in ("queued", "running")]
        assert len(set(checks)) == len(checks)
        brought = self.desk.rows(
            "select (args ->> 'lease')::bigint as lease from procrastinate_jobs where status = 'todo'"
        )
        assert {row["lease"] for row in brought} == {lease["id"] for lease in active}

    @invariant()
    def nobody_is_forgotten(self) -> None:
        assert not self.forgotten(avoiding=False)

    def forgotten(self, *, avoiding: bool) -> list[tuple[int, str]]:
        """Return queued jobs that match a free board. Jobs that avoid a board count only after a tick."""
        boards = self.desk.rows(
            "select *, owned_until > now() as attended from hil.boards as board where worker <> '' and hold = ''"
            " and not exists (select from hil.leases where board = board.name and ended_at is null)"
        )
        queued = self.desk.rows(
            "select job.*, submission.selector, submission.board from hil.jobs as job"
            " join hil.submissions as submission on submission.id = job.submission where job.state = 'queued'"
        )
        found = []
        for job in queued:
            able = [
                one["name"]
                for one in boards
                if one["attended"]
                and job["board"] in ("", one["name"])
                and parse(job["selector"]).matches(one["labels"])
                and (one["state"] == "online" or (job["kind"] == "health" and one["state"] != "offline"))
            ]
            if job["avoid"] and not avoiding:
                continue
            found += [
                (job["id"], name) for name in able if name not in job["avoid"] or not set(able) - set(job["avoid"])
            ]
        return found if not avoiding else [one for one in found if not self.elsewhere(one[0])]

    def elsewhere(self, job: int) -> bool:
        """Return whether a job that avoids boards can still expect another one."""
        [row] = self.desk.rows(
            "select job.avoid, submission.selector from hil.jobs as job"
            " join hil.submissions as submission on submission.id = job.submission where job.id = %s", job
        )  # fmt: skip
        others = self.desk.rows(
            "select * from hil.boards where worker <> '' and hold = '' and state in ('online', 'suspect')"
            " and owned_until > now() and not name = any(%s)", row["avoid"]
        )  # fmt: skip
        return bool(row["avoid"]) and any(parse(row["selector"]).matches(one["labels"]) for one in others)

    def active(self) -> list[int]:
        return [one.lease for one in self.desk.grants()]

    def pick(self, which: int) -> int:
        return self.active()[which % len(self.active())]


@pytest.mark.ci
@pytest.mark.parametrize("examples", [12, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_farm_invariants_survive_random_operations(farm_db: str, examples: int) -> None:
    # Time passes only in rules.
    never = {"lease_s": 1e6, "owner_s": 1e6, "holder_s": 1e6, "quarantine_s": 1e6, "quarantine_most_s": 1e6}
    with open_desk(farm_db, **never) as desk:
        machine = type("FarmOverADatabase", (Farm,), {"desk": desk})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

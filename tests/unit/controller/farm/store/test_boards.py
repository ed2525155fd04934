"""Test boards that connect, disconnect, change hosts and are drained."""

from __future__ import annotations

import pytest
from support.farm_desks import BROKEN, Desk

from hil.controller.farm.messages import BoardCard, Kind
from hil.controller.farm.store import queries
from hil.controller.records.base import make_record
from hil.errors import UsageError


def test_new_board_runs_check_before_first_job(desk: Desk) -> None:
    assert desk.attend("a", labels={"chip": "a53"}).owner
    [name] = desk.submit()
    assert desk.board("a")["state"] == "suspect"
    assert desk.grant("a").spec.kind is Kind.HEALTH
    desk.report(desk.grant("a"))
    assert desk.grant("a").job == name


def test_board_row_stores_card(desk: Desk) -> None:
    desk.attend(
        "a", site="attic", hw_type="rpi", labels={"chip": "a53", "name": "x"}, fence=40, config="[board]\0"[:-1]
    )
    board = desk.board("a")
    assert board["labels"] == {"chip": "a53", "name": "a", "site": "attic", "host": "h", "hw_type": "rpi"}
    assert (board["site"], board["host"], board["hw_type"]) == ("attic", "h", "rpi")
    assert make_record(board["card"], BoardCard).labels == {"chip": "a53", "name": "x"}
    assert desk.grant("a").fence == 41


def test_recently_checked_board_returns_without_check(desk: Desk) -> None:
    desk.online("a")
    desk.leave("a")
    assert (desk.board("a")["state"], desk.board("a")["worker"]) == ("offline", "")
    desk.attend("a", "a new worker")
    assert desk.board("a")["state"] == "online"


@pytest.mark.parametrize("why", ["old", "failed"])
def test_stale_or_failed_board_runs_check_on_return(desk: Desk, why: str) -> None:
    desk.online("a")
    if why == "failed":
        desk.submit(max_attempts=1)
    desk.leave("a")
    if why == "old":
        desk.rows("update hil.boards set checked_at = now() - interval '7 h'")
    desk.attend("a")
    assert desk.board("a")["state"] == "suspect"
    assert desk.grant("a").spec.kind is Kind.HEALTH


def test_standby_host_takes_board_after_loss_of_owner(desk: Desk) -> None:
    desk.online("a", host="north")
    [name] = desk.submit(max_attempts=2)
    before = desk.grant("a")
    standing = desk.attend("a", "south a", [before.lease], host="south")
    assert not standing.owner
    assert standing.over == {before.lease: "lease of a different worker"}
    assert desk.beat("a", worker="south a").vacant is False
    desk.silence("a")
    assert not desk.attend("a", "south a", host="south").owner
    desk.tick()
    assert desk.beat("a", worker="south a").vacant is True
    assert desk.attend("a", "south a", host="south").owner
    assert desk.beat("a", [before.lease]).owner is False
    check = desk.grant("a")
    assert check.fence > before.fence
    desk.report(check)
    assert (desk.grant("a").job, desk.grant("a").attempt) == (name, 2)
    assert desk.board("a")["host"] == "south"


def test_restarted_worker_takes_board_immediately(desk: Desk) -> None:
    desk.online("a")
    desk.online("b")
    [name] = desk.submit()
    before = desk.grant("a")
    attendance = desk.attend("a", "a new worker")
    assert attendance.owner
    assert desk.lease(before.lease)["reason"] == "the host started a new worker for the board"
    assert desk.grant("b").job == name
    assert desk.report(before, worker="worker of a")[0] is False


def test_returning_worker_receives_missed_grants_and_ends(desk: Desk) -> None:
    desk.online("a")
    desk.submit()
    lease = desk.grant("a").lease
    assert [grant.lease for grant in desk.attend("a").grants] == [lease]
    assert desk.attend("a", held=[lease]).grants == []
    desk.report(lease)
    desk.submit()
    attendance = desk.attend("a", held=[lease])
    assert attendance.over == {lease: "PASS"}
    assert [grant.lease for grant in attendance.grants] == [desk.grant("a").lease]
    assert desk.board("a")["state"] == "online"


def test_leaving_worker_returns_job_to_queue(desk: Desk) -> None:
    desk.online("a", "b")
    [name] = desk.submit()
    desk.leave("a", "another worker")
    assert desk.grant("a").job == name
    desk.leave("a")
    assert desk.grant("b").job == name
    assert ("board.offline", "the host h was stopped") in desk.events(board="a")


def test_stopped_host_does_not_use_up_attempts(desk: Desk) -> None:
    desk.online("a")
    [name] = desk.submit(max_attempts=1)
    for number in range(3):
        if number:
            desk.online("a")
        # Not excluded from the board, because the board did not fail.
        grant = desk.grant("a")
        assert (grant.job, grant.attempt) == (name, 1)
        desk.started(grant.lease)
        desk.leave("a")
        assert desk.jobs()[name] == "queued"
    assert ("job.again", "the host h was stopped") in desk.events(job=name)
    desk.online("a")
    desk.silence("a")
    desk.tick()
    assert desk.result(name)["result"]["reason"].endswith("(attempt 1 of 1)")


def test_stopped_host_ends_lease_in_use(desk: Desk) -> None:
    desk.online("a")
    [name] = desk.submit(kind=Kind.LEASE)
    desk.started(desk.grant("a").lease)
    desk.leave("a")
    assert desk.result(name)["result"]["reason"] == "the host h was stopped"


def test_leaving_worker_cancels_pending_check(desk: Desk) -> None:
    desk.online("a")
    desk.submit(max_attempts=1)
    desk.report(desk.grant("a"), BROKEN)
    desk.report(desk.grant("a"), BROKEN)
    desk.rows("update hil.boards set check_at = now()")
    desk.drain("a")
    desk.resume("a")
    assert desk.grant("a").spec.kind is Kind.HEALTH
    desk.leave("a")
    assert desk.rows("select from hil.jobs where state in ('queued', 'running')") == []


def test_drained_board_finishes_job_and_starts_none(desk: Desk) -> None:
    desk.online("a")
    first, second = desk.submit(2)
    desk.drain("a", "new fan")
    assert desk.board("a")["hold_reason"] == "drained by root: new fan"
    assert ("board.maintenance", "") not in [(what, "") for what, _ in desk.events(board="a")]
    desk.report(desk.grant("a"))
    assert desk.jobs() == {first: "done", second: "queued"}
    assert desk.tick() == 0
    assert desk.events(board="a")[-1][0] == "board.maintenance"
    desk.resume("a")
    assert desk.grant("a").job == second
    assert (desk.board("a")["hold"], desk.board("a")["hold_reason"]) == ("", "")


@pytest.mark.ci
def test_board_failed_while_draining_runs_check_on_resume(desk: Desk) -> None:
    desk.online("a")
    desk.submit(max_attempts=1)
    desk.drain("a")
    desk.report(desk.grant("a"), BROKEN)
    desk.tick()
    assert desk.grants() == []
    assert desk.rows("select from hil.jobs where state = 'queued'") == []
    desk.resume("a")
    assert desk.grant("a").spec.kind is Kind.HEALTH


def test_resume_checks_quarantined_board_immediately(desk: Desk) -> None:
    desk.attend("a")
    desk.report(desk.grant("a"), BROKEN)
    assert (desk.board("a")["state"], desk.grants()) == ("quarantined", [])
    desk.resume("a")
    assert (desk.board("a")["state"], desk.grant("a").spec.kind) == ("suspect", Kind.HEALTH)


@pytest.mark.parametrize("deed", ["drain", "resume", "forget"])
def test_board_commands_reject_unknown_board(desk: Desk, deed: str) -> None:
    desk.online("rpi5")
    with pytest.raises(UsageError, match="board 'rpi6' not found") as refused:
        getattr(desk, deed)("rpi6")
    assert "did you mean 'rpi5'" in refused.value.hint


def test_drain_reason_survives_host_restart(desk: Desk) -> None:
    desk.online("a", "b")
    desk.drain("a", "new cable")
    [name] = desk.submit(board="a")

    def told() -> tuple[str, str]:
        [board] = [one for one in desk.do(queries.boards) if one.name == "a"]
        return board.state, board.reason

    assert told() == ("maintenance", "drained by root: new cable")
    desk.leave("a")
    assert told() == ("maintenance", "drained by root: new cable")
    desk.attend("a", "a new worker")
    assert told() == ("maintenance", "drained by root: new cable")
    desk.silence("a")
    desk.tick()
    assert told() == ("maintenance", "drained by root: new cable")
    [waiting] = desk.do(queries.queue, desk.settings)
    assert (waiting.name, waiting.why) == (name, "a is drained by root: new cable")
    desk.attend("a", "a third worker")
    desk.resume("a")
    assert told()[1] == ""

"""Boards come, go, change hands, and are held back."""

from __future__ import annotations

import pytest
from support.farm_desks import BROKEN, Desk

from hil.controller.farm.messages import BoardCard, Kind
from hil.errors import UsageError


def test_a_new_board_is_checked_before_anything_else(desk: Desk) -> None:
    assert desk.attend("a", labels={"chip": "a53"}).owner
    [name] = desk.submit()
    assert desk.board("a")["state"] == "suspect"
    assert desk.grant("a").spec.kind is Kind.HEALTH
    desk.report(desk.grant("a"))
    assert desk.grant("a").job == name


def test_a_board_is_what_its_card_says(desk: Desk) -> None:
    desk.attend(
        "a", site="attic", hw_type="rpi", labels={"chip": "a53", "name": "x"}, fence=40, config="[board]\0"[:-1]
    )
    board = desk.board("a")
    assert board["labels"] == {"chip": "a53", "name": "a", "site": "attic", "host": "h", "hw_type": "rpi"}
    assert (board["site"], board["host"], board["hw_type"]) == ("attic", "h", "rpi")
    assert BoardCard.of_json(board["card"]).labels == {"chip": "a53", "name": "x"}
    assert desk.grant("a").fence == 41


def test_a_board_that_is_back_soon_need_not_be_checked(desk: Desk) -> None:
    desk.online("a")
    desk.leave("a")
    assert (desk.board("a")["state"], desk.board("a")["worker"]) == ("offline", "")
    desk.attend("a", "a new worker")
    assert desk.board("a")["state"] == "online"


@pytest.mark.parametrize("why", ["old", "failed"])
def test_a_board_is_checked_when_it_is_back_late_or_was_lost_at_work(desk: Desk, why: str) -> None:
    desk.online("a")
    if why == "failed":
        desk.submit(max_attempts=1)
    desk.leave("a")
    if why == "old":
        desk.rows("update hil.boards set checked_at = now() - interval '7 h'")
    desk.attend("a")
    assert desk.board("a")["state"] == "suspect"
    assert desk.grant("a").spec.kind is Kind.HEALTH


def test_another_host_stands_by_until_the_owner_is_lost(desk: Desk) -> None:
    desk.online("a", host="north")
    [name] = desk.submit(max_attempts=2)
    before = desk.grant("a")
    standing = desk.attend("a", "south a", [before.lease], host="south")
    assert not standing.owner
    assert standing.over == {before.lease: "it was never this worker's"}
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


def test_the_worker_that_a_host_starts_anew_takes_its_board_at_once(desk: Desk) -> None:
    desk.online("a")
    desk.online("b")
    [name] = desk.submit()
    before = desk.grant("a")
    attendance = desk.attend("a", "a new worker")
    assert attendance.owner
    assert desk.lease(before.lease)["reason"] == "its host has started another worker for it"
    assert desk.grant("b").job == name
    assert desk.report(before, worker="worker of a")[0] is False


def test_a_worker_that_is_back_is_told_what_it_missed(desk: Desk) -> None:
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


def test_what_a_worker_that_leaves_had_to_do_goes_elsewhere(desk: Desk) -> None:
    desk.online("a", "b")
    [name] = desk.submit()
    desk.leave("a", "another worker")
    assert desk.grant("a").job == name
    desk.leave("a")
    assert desk.grant("b").job == name
    assert ("board.offline", "its worker was stopped") in desk.events(board="a")


def test_a_check_that_waits_for_a_board_that_is_gone_is_called_off(desk: Desk) -> None:
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


def test_a_drained_board_ends_what_it_does_and_begins_nothing(desk: Desk) -> None:
    desk.online("a")
    first, second = desk.submit(2)
    desk.drain("a", "new fan")
    assert desk.board("a")["reason"] == "drained by root: new fan"
    assert ("board.maintenance", "") not in [(what, "") for what, _ in desk.events(board="a")]
    desk.report(desk.grant("a"))
    assert desk.jobs() == {first: "done", second: "queued"}
    assert desk.tick() == 0
    assert desk.events(board="a")[-1][0] == "board.maintenance"
    desk.resume("a")
    assert desk.grant("a").job == second
    assert (desk.board("a")["hold"], desk.board("a")["reason"]) == ("", "")


def test_a_board_that_is_drained_while_it_fails_is_checked_once_it_is_resumed(desk: Desk) -> None:
    desk.online("a")
    desk.submit(max_attempts=1)
    desk.drain("a")
    desk.report(desk.grant("a"), BROKEN)
    desk.tick()
    assert desk.grants() == []
    assert desk.rows("select from hil.jobs where state = 'queued'") == []
    desk.resume("a")
    assert desk.grant("a").spec.kind is Kind.HEALTH


def test_a_quarantined_board_that_is_resumed_is_checked_at_once(desk: Desk) -> None:
    desk.attend("a")
    desk.report(desk.grant("a"), BROKEN)
    assert (desk.board("a")["state"], desk.grants()) == ("quarantined", [])
    desk.resume("a")
    assert (desk.board("a")["state"], desk.grant("a").spec.kind) == ("suspect", Kind.HEALTH)


@pytest.mark.parametrize("deed", ["drain", "resume", "forget"])
def test_a_board_that_the_farm_has_not_is_refused(desk: Desk, deed: str) -> None:
    desk.online("rpi5")
    with pytest.raises(UsageError, match="no board 'rpi6'") as refused:
        getattr(desk, deed)("rpi6")
    assert "did you mean 'rpi5'" in refused.value.hint

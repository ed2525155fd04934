"""Test who may switch a board's power or write an image, and the board's state before and after, on a database."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.farm_desks import ADMIN, ANNA, BERT, BROKEN, Desk

from hil.controller.farm.leasing.board_power import PowerRequest, begin_power_action, end_power_action
from hil.controller.farm.messages import PROVISION, Kind, Principal, Right, Role
from hil.errors import AccessRefused, FarmError, UsageError

MAY = replace(ANNA, rights=frozenset({Right.POWER}))
ALL = ["on", "off", "cycle"]


def begin(desk: Desk, action: str = "cycle", who: Principal = MAY, board: str = "pi") -> PowerRequest:
    return desk.do(begin_power_action, who, board, action)


def end(desk: Desk, request: PowerRequest, error: str = "") -> None:
    desk.do(end_power_action, desk.queue, request, error, desk.settings)


@pytest.fixture
def pi(desk: Desk) -> Desk:
    desk.online("pi", power=ALL)
    return desk


def test_power_needs_right_or_admin(pi: Desk) -> None:
    viewer = Principal("vic", Role.VIEWER, rights=frozenset({Right.POWER}))
    for who in (ANNA, BERT, viewer):
        with pytest.raises(AccessRefused, match="lacks the right power"):
            begin(pi, who=who)
    assert begin(pi, who=ADMIN).force


def test_power_rejects_impossible_actions(pi: Desk) -> None:
    pi.online("old")
    pi.online("switch", power=["off"])
    pi.online("gone", power=ALL)
    pi.leave("gone")
    cases: list[tuple[str, str, type[Exception], str]] = [
        ("pie", "cycle", UsageError, "'pie' not found"),
        ("pi", "reset", UsageError, "unknown power action"),
        ("old", "cycle", UsageError, "available: none"),
        ("switch", "cycle", UsageError, "available: off"),
        ("gone", "cycle", FarmError, "offline"),
    ]
    for board, action, error, text in cases:
        with pytest.raises(error, match=text):
            begin(pi, action, board=board)


def test_no_job_starts_during_power_cycle_and_check_follows(pi: Desk) -> None:
    request = begin(pi)
    [job] = pi.submit()
    assert pi.grants() == [] and pi.board("pi")["hold_reason"] == "power cycle by anna"
    end(pi, request)
    assert pi.board("pi")["hold"] == ""
    check = pi.grant("pi")
    assert check.spec.kind is Kind.HEALTH
    pi.report(check)
    assert pi.grant("pi").job == job
    assert [one for one in pi.events(board="pi") if "power" in one[0]] == [("board.power", "cycle by anna")]


def test_failed_power_cycle_is_logged_and_board_is_checked(pi: Desk) -> None:
    end(pi, begin(pi), "the switch does not respond")
    assert ("board.power_failed", "cycle by anna: the switch does not respond") in pi.events(board="pi")
    assert pi.grant("pi").spec.kind is Kind.HEALTH


def test_board_that_is_switched_off_stays_out_of_service_until_on(pi: Desk) -> None:
    end(pi, begin(pi, "off"))
    pi.submit()
    pi.tick()
    assert pi.grants() == [] and pi.board("pi")["hold_reason"] == "switched off by anna"
    end(pi, begin(pi, "on", who=ADMIN))
    assert pi.board("pi")["hold"] == "" and pi.grant("pi").spec.kind is Kind.HEALTH


def test_failed_switch_off_returns_board_to_service(pi: Desk) -> None:
    end(pi, begin(pi, "off"), "no answer")
    assert pi.board("pi")["hold"] == ""


def test_power_keeps_board_drained_by_admin(pi: Desk) -> None:
    pi.drain("pi", "new cable")
    for action in ("off", "on", "cycle"):
        end(pi, begin(pi, action))
    assert pi.board("pi")["hold_reason"] == "drained by root: new cable"


def test_board_of_other_user_needs_admin(pi: Desk) -> None:
    pi.submit(who=BERT)
    with pytest.raises(AccessRefused, match="pi is used by bert"):
        begin(pi)
    request = begin(pi, who=ADMIN)
    assert (request.lease, request.force, pi.board("pi")["hold"]) == (0, True, "")


def test_power_of_own_lease_does_not_drain_board(pi: Desk) -> None:
    pi.submit(kind=Kind.LEASE, who=MAY)
    lease = pi.grant("pi").lease
    request = begin(pi)
    assert (request.lease, request.force, pi.board("pi")["hold"]) == (lease, False, "")
    end(pi, request)
    assert pi.board("pi")["state"] == "online"


def test_power_during_check_is_refused(desk: Desk) -> None:
    desk.attend("pi", power=ALL)
    with pytest.raises(FarmError, match="being checked"):
        begin(desk)


@pytest.mark.parametrize("who", [MAY, replace(BERT, rights=frozenset({Right.POWER}))])
def test_repeated_power_action_waits_for_first(pi: Desk, who: Principal) -> None:
    first = begin(pi)
    second = begin(pi, who=who)
    end(pi, second, "a different power action is running")
    assert pi.board("pi")["hold_reason"] == first.reason
    end(pi, first)
    assert pi.board("pi")["hold"] == ""


IMAGES = replace(ANNA, rights=frozenset({Right.PROVISION}))
IMAGE = "sha256:" + "0" * 64


def begin_image(desk: Desk, who: Principal = IMAGES, board: str = "pi") -> PowerRequest:
    return desk.do(begin_power_action, who, board, PROVISION, "card.img", IMAGE)


@pytest.fixture
def flashed(desk: Desk) -> Desk:
    desk.online("pi", provisions=True)
    return desk


def test_image_needs_own_right(flashed: Desk) -> None:
    for who in (ANNA, MAY):
        with pytest.raises(AccessRefused, match="lacks the right provision"):
            begin_image(flashed, who)
    assert not begin_image(flashed, ADMIN).force


def test_image_needs_host_that_can_write_it(flashed: Desk) -> None:
    flashed.online("old", power=ALL)
    flashed.online("gone", provisions=True)
    flashed.leave("gone")
    with pytest.raises(UsageError, match="the host of old cannot write images"):
        begin_image(flashed, board="old")
    with pytest.raises(FarmError, match="offline: no host can write the image"):
        begin_image(flashed, board="gone")


def test_no_job_starts_during_image_and_check_follows(flashed: Desk) -> None:
    request = begin_image(flashed)
    [job] = flashed.submit()
    assert flashed.grants() == [] and flashed.board("pi")["hold_reason"] == "image card.img by anna"
    end(flashed, request)
    check = flashed.grant("pi")
    assert check.spec.kind is Kind.HEALTH
    flashed.report(check)
    assert flashed.grant("pi").job == job
    events = [one for one in flashed.events(board="pi") if "provision" in one[0]]
    assert events == [(f"board.{what}", f"card.img ({IMAGE}) by anna") for what in ("provision", "provisioned")]


def test_quarantined_board_is_checked_after_image(desk: Desk) -> None:
    desk.attend("pi", provisions=True)
    desk.report(desk.grant("pi"), BROKEN)
    assert desk.board("pi")["state"] == "quarantined"
    end(desk, begin_image(desk))
    assert desk.board("pi")["state"] == "suspect" and desk.grant("pi").spec.kind is Kind.HEALTH


def test_failed_image_is_logged_and_board_is_checked(flashed: Desk) -> None:
    end(flashed, begin_image(flashed), "no partition table")
    assert ("board.provision_failed", "card.img by anna: no partition table") in flashed.events(board="pi")
    assert flashed.grant("pi").spec.kind is Kind.HEALTH


def test_image_keeps_board_drained_by_admin(flashed: Desk) -> None:
    flashed.drain("pi", "new cable")
    end(flashed, begin_image(flashed))
    assert (flashed.board("pi")["hold_reason"], flashed.board("pi")["state"]) == (
        "drained by root: new cable",
        "suspect",
    )


def test_image_during_job_is_refused_also_for_admin(flashed: Desk) -> None:
    flashed.submit(who=BERT)
    for who in (IMAGES, ADMIN):
        with pytest.raises(AccessRefused, match="pi is used by bert"):
            begin_image(flashed, who)


def test_lease_holder_writes_image_and_check_follows_lease(flashed: Desk) -> None:
    with pytest.raises(FarmError, match="pi runs your job"):
        flashed.submit(who=IMAGES)
        begin_image(flashed)
    flashed.report(flashed.grant("pi"))
    flashed.submit(kind=Kind.LEASE, who=IMAGES)
    grant = flashed.grant("pi")
    request = begin_image(flashed)
    assert request.lease == grant.lease
    end(flashed, request)
    assert flashed.board("pi")["hold"] == "" and flashed.grant("pi") == grant
    flashed.report(grant)
    assert flashed.grant("pi").spec.kind is Kind.HEALTH

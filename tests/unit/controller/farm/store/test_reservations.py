"""Test reservations of boards, on a real database."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from support.farm_desks import ADMIN, ANNA, BERT, Desk

from hil.controller.farm.leasing.reservations import cancel_reservation, reserve
from hil.controller.farm.messages import Kind, Principal
from hil.controller.farm.settings import FarmLimits, UserLimits
from hil.controller.farm.store import queries
from hil.controller.records.lab.farm import FarmReservation
from hil.errors import AccessRefused, FarmError, NoSuchBoard, UsageError

HOUR = 3600.0


@pytest.fixture
def farm(desk: Desk) -> Desk:
    desk.online("a", "b")
    return desk


def book(desk: Desk, in_s: float, seconds: float = HOUR, who: Principal = ANNA, selector: str = "") -> FarmReservation:
    return desk.do(reserve, who, selector, time.time() + in_s, seconds, desk.settings)


def test_reserved_board_runs_only_jobs_of_its_user(farm: Desk) -> None:
    assert book(farm, 0, selector="name=a").board == "a"
    farm.submit(2, who=BERT)
    assert [(one.board, one.user) for one in farm.grants()] == [("b", "bert")]
    farm.tick()
    farm.submit(who=ANNA)
    assert sorted((one.board, one.user) for one in farm.grants()) == [("a", "anna"), ("b", "bert")]


def test_reserved_board_still_gets_checks(farm: Desk) -> None:
    book(farm, 0, selector="name=a")
    farm.rows("update hil.boards set checked_at = null where name = 'a'")
    farm.tick()
    assert farm.grant("a").spec.kind is Kind.HEALTH


def test_waiting_job_names_reservation(farm: Desk) -> None:
    book(farm, 0, selector="name=a")
    farm.submit(who=BERT, board="a")
    [waits] = farm.do(queries.queue, farm.settings)
    assert waits.why == "a is reserved for anna"


def test_board_is_free_for_others_long_before_reservation(farm: Desk) -> None:
    book(farm, 2 * HOUR, selector="name=a")
    farm.submit(who=BERT, board="a")
    assert [one.board for one in farm.grants()] == ["a"]


def test_board_starts_no_jobs_of_others_shortly_before_reservation(farm: Desk) -> None:
    book(farm, farm.settings.reserve_lead_s - 60, selector="name=a")
    farm.submit(who=BERT, board="a")
    assert farm.grants() == []


def test_ended_and_cancelled_reservations_have_no_effect(farm: Desk) -> None:
    one = book(farm, 0, selector="name=a")
    with pytest.raises(AccessRefused, match="belongs to anna"):
        farm.do(cancel_reservation, BERT, one.id)
    assert farm.do(cancel_reservation, ADMIN, one.id) == "a"
    with pytest.raises(UsageError, match=f"reservation {one.id} not found"):
        farm.do(cancel_reservation, ANNA, one.id)
    book(farm, 0, selector="name=b")
    farm.rows("update hil.reservations set begins_at = now() - interval '2 h', ends_at = now() - interval '1 h'")
    assert farm.do(queries.list_reservations) == []
    farm.submit(2, who=BERT)
    assert len(farm.grants()) == 2
    assert [what for what, _ in farm.events(board="a") if "reserved" in what] == ["board.reserved", "board.unreserved"]


def test_reservations_of_a_board_do_not_overlap(farm: Desk) -> None:
    assert {book(farm, HOUR).board, book(farm, 1.5 * HOUR, who=BERT).board} == {"a", "b"}
    with pytest.raises(FarmError, match="all 2 matching boards are reserved"):
        book(farm, 1.75 * HOUR, HOUR / 2)
    assert book(farm, 2.6 * HOUR).board in ("a", "b")
    assert [one.user for one in farm.do(queries.list_reservations)] == ["anna", "bert", "anna"]


def test_reservation_prefers_board_in_service(farm: Desk) -> None:
    farm.drain("a")
    assert book(farm, HOUR).board == "b"


def test_invalid_reservations_are_refused(farm: Desk) -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"in_s": -HOUR}, UsageError, "next 60 days"),
        ({"in_s": 61 * 24 * HOUR}, UsageError, "next 60 days"),
        ({"in_s": float("nan")}, UsageError, "next 60 days"),
        ({"in_s": HOUR, "seconds": 1.0}, UsageError, "must last from 60 s"),
        ({"in_s": HOUR, "seconds": float("inf")}, UsageError, "must last from 60 s"),
        ({"in_s": HOUR, "selector": "gpu"}, NoSuchBoard, "no board matches 'gpu'"),
        ({"in_s": HOUR, "selector": "=="}, UsageError, "selector"),
    ]
    for given, error, text in cases:
        with pytest.raises(error, match=text):
            book(farm, **given)


def test_reservations_respect_limits(farm: Desk) -> None:
    farm.settings = replace(farm.settings, limits=FarmLimits(UserLimits(lease_hours=2)))
    with pytest.raises(UsageError, match="to 2 h"):
        book(farm, HOUR, 3 * HOUR)
    for number in range(20):
        book(farm, (number + 1) * 3 * HOUR)
    with pytest.raises(FarmError, match="already has 20 reservations"):
        book(farm, 100 * HOUR)

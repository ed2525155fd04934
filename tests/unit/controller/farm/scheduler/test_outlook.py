"""Test the queue position of a waiting job and the reason why it waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_farm_client import job as fake_job
from support.fake_farm_client import parsed

from hil.controller.farm.messages import BoardState, Kind, Priority
from hil.controller.farm.scheduler.candidates import BoardRow, BoardUse, FreeBoard, WaitingJob
from hil.controller.farm.scheduler.outlook import explain_waiting, find_blocked, list_outlooks
from hil.controller.farm.scheduler.policy import assign, order_turns

AGING_S = 600.0
PI = BoardRow(
    "pi", {"name": "pi", "chip": "a72"}, BoardState.ONLINE, held=False, attended=True, busy=True, unchecked=False,
    warm=frozenset(),
)  # fmt: skip
NANO = replace(PI, name="nano", labels={"name": "nano", "chip": "a57"})


def job(number: int, user: str = "ada", **settings: object) -> WaitingJob:
    """Return a job. Of similar jobs, the one with the lower number has waited longer."""
    return WaitingJob(number, user, **{"waits_s": 100.0 - number, **settings})  # type: ignore[arg-type]


def places(jobs: Sequence[WaitingJob], most: int = 100) -> list[tuple[int, int]]:
    return [(one.job, one.position) for one in list_outlooks(jobs, [PI, NANO], {}, AGING_S, most)]


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        pytest.param([], [], id="nobody waits"),
        pytest.param([job(2), job(1)], [(1, 1), (2, 2)], id="who has waited longest"),
        pytest.param([job(1), job(2, priority=Priority.HIGH)], [(2, 1), (1, 2)], id="the higher class"),
        pytest.param(
            [job(1), job(2), job(3, "bob"), job(4, "bob")], [(1, 1), (3, 2), (2, 3), (4, 4)], id="users take turns"
        ),
        pytest.param(
            [job(1, selector="chip=a72"), job(2, selector="chip=a57"), job(3)],
            [(1, 1), (2, 1), (3, 3)],
            id="who waits for other boards is not before it",
        ),
        pytest.param([job(1, selector="gpu"), job(2)], [(2, 1), (1, 0)], id="what no board is has no place"),
        pytest.param([job(1, board="pi", kind=Kind.HEALTH), job(2)], [(2, 1), (1, 0)], id="checks have none"),
    ],
)
def test_outlook_orders_waiting_jobs(jobs: list[WaitingJob], expected: list[tuple[int, int]]) -> None:
    assert places(jobs) == expected


def test_outlook_limits_number_of_jobs() -> None:
    assert places([job(number) for number in range(1, 9)], 3) == [(1, 1), (2, 2), (3, 3)]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(list(Priority)), st.integers(0, 2000)), max_size=12),
    st.dictionaries(st.tuples(st.sampled_from("abc"), st.just("")), st.builds(BoardUse, st.integers(0, 2))),
)
def test_turns_begin_with_assigned_jobs(
    drawn: list[tuple[str, Priority, int]], use: dict[tuple[str, str], BoardUse]
) -> None:
    jobs = [
        WaitingJob(number, user, priority=priority, waits_s=float(waits))
        for number, (user, priority, waits) in enumerate(drawn, 1)
    ]
    boards = [FreeBoard("pi"), FreeBoard("nano")]
    order = order_turns(jobs, boards, use, AGING_S)
    assert sorted(order) == [one.id for one in jobs]
    assert [number for number, _ in assign(jobs, boards, use, AGING_S)] == order[:2]


@pytest.mark.parametrize(
    ("board", "expected"),
    [
        (PI, "pi is busy"),
        (replace(PI, attended=False), "pi is offline"),
        (replace(PI, state=BoardState.OFFLINE), "pi is offline"),
        (replace(PI, held=True, hold_reason="drained by ann: new cable"), "pi is drained by ann: new cable"),
        (replace(PI, held=True, hold_reason="drained by ann", attended=False), "pi is drained by ann"),
        (replace(PI, state=BoardState.QUARANTINED, busy=False), "pi is quarantined"),
        (replace(PI, state=BoardState.SUSPECT, busy=False), "pi is waiting for a health check"),
        (replace(PI, busy=False, unchecked=True), "pi is waiting for a health check"),
        (replace(PI, busy=False), "pi is free"),
    ],
)
def test_why_waiting_describes_board_state(board: BoardRow, expected: str) -> None:
    assert explain_waiting(job(1), [board], 0) == expected


def test_why_waiting_groups_boards_by_reason() -> None:
    boards = [
        *(replace(PI, name=f"pi{number}") for number in range(5)),
        replace(NANO, held=True, hold_reason="drained by ann"),
    ]
    assert explain_waiting(job(1), boards, 2) == (
        "pi0, pi1, pi2 and 2 more are busy; nano is drained by ann; 2 jobs ahead"
    )
    assert explain_waiting(job(1, avoid=frozenset(["pi"])), [PI], 1) == "pi failed this job before; 1 job ahead"


def test_why_waiting_bounds_text_of_drained_boards() -> None:
    boards = [replace(PI, name=f"pi{n}", held=True, hold_reason=f"drained by ann: {n} {'x' * 900}") for n in range(9)]
    text = explain_waiting(job(1), boards, 0)
    assert text.startswith("pi0 is drained by ann: 0 xx") and "pi3, pi4, pi5 and 3 more are drained" in text
    assert len(text) < 500
    same = [replace(board, hold_reason="drained by ann: moved") for board in boards[:2]]
    assert explain_waiting(job(1), same, 0) == "pi0, pi1 are drained by ann: moved"


def test_outlook_explains_unmatched_selector() -> None:
    [found] = list_outlooks([job(1, selector="chip=a72, gpu")], [PI, NANO], {}, AGING_S, 10)
    assert found.why == "no board matches; pi: has no gpu; nano: chip is a57, not a72, has no gpu"
    [found] = list_outlooks([job(1, board="gone")], [PI], {}, AGING_S, 10)
    assert found.why == "board gone not found"


DRAINED = replace(PI, held=True, hold_reason="drained by ann: new cable")
OFFLINE, QUARANTINED = replace(NANO, attended=False), replace(NANO, state=BoardState.QUARANTINED)


@pytest.mark.parametrize(
    ("selector", "pinned", "boards", "why"),
    [
        pytest.param("", "", [DRAINED], "pi is drained by ann: new cable", id="drained"),
        pytest.param("", "", [DRAINED, OFFLINE], "pi is drained by ann: new cable; nano is offline", id="offline"),
        pytest.param("chip=a57", "", [PI, QUARANTINED], "nano is quarantined", id="others do not match"),
        pytest.param("", "pi", [DRAINED, NANO], "pi is drained by ann: new cable", id="pinned"),
        pytest.param("", "old", [PI], "board old not found", id="removed"),
        pytest.param("", "", [DRAINED, NANO], "", id="one in service"),
        pytest.param("", "", [replace(PI, state=BoardState.SUSPECT)], "", id="to be checked first"),
    ],
)
def test_blocked_lists_jobs_without_board_in_service(
    selector: str, pinned: str, boards: list[BoardRow], why: str
) -> None:
    waiting = parsed("jobs", [fake_job("17", selector=selector, pinned=pinned)])
    assert find_blocked(waiting, boards) == ({"17": why} if why else {})

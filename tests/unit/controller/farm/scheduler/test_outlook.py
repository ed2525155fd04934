"""When it is a waiting job's turn, and why it waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hil.controller.farm.messages import BoardState, Kind, Priority
from hil.controller.farm.scheduler.outlook import outlooks, why_waiting
from hil.controller.farm.scheduler.policy import BoardRow, Free, Use, Waiting, assign, turns

AGING_S = 600.0
PI = BoardRow(
    "pi", {"name": "pi", "chip": "a72"}, BoardState.ONLINE, held=False, attended=True, busy=True, unchecked=False,
    warm=frozenset(),
)  # fmt: skip
NANO = replace(PI, name="nano", labels={"name": "nano", "chip": "a57"})


def job(number: int, user: str = "ada", **settings: object) -> Waiting:
    """A job; of several alike the one with the lower number has waited longer."""
    return Waiting(number, user, **{"waits_s": 100.0 - number, **settings})  # type: ignore[arg-type]


def places(jobs: Sequence[Waiting], most: int = 100) -> list[tuple[int, int]]:
    return [(one.job, one.position) for one in outlooks(jobs, [PI, NANO], {}, AGING_S, most)]


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
def test_each_job_has_its_place(jobs: list[Waiting], expected: list[tuple[int, int]]) -> None:
    assert places(jobs) == expected


def test_only_so_many_are_told() -> None:
    assert places([job(number) for number in range(1, 9)], 3) == [(1, 1), (2, 2), (3, 3)]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(list(Priority)), st.integers(0, 2000)), max_size=12),
    st.dictionaries(st.tuples(st.sampled_from("abc"), st.just("")), st.builds(Use, st.integers(0, 2))),
)
def test_the_first_turns_are_those_that_boards_are_given_by(
    drawn: list[tuple[str, Priority, int]], use: dict[tuple[str, str], Use]
) -> None:
    jobs = [
        Waiting(number, user, priority=priority, waits_s=float(waits))
        for number, (user, priority, waits) in enumerate(drawn, 1)
    ]
    boards = [Free("pi"), Free("nano")]
    order = turns(jobs, boards, use, AGING_S)
    assert sorted(order) == [one.id for one in jobs]
    assert [number for number, _ in assign(jobs, boards, use, AGING_S)] == order[:2]


@pytest.mark.parametrize(
    ("board", "expected"),
    [
        (PI, "pi is busy"),
        (replace(PI, attended=False), "pi is offline"),
        (replace(PI, state=BoardState.OFFLINE), "pi is offline"),
        (replace(PI, held=True), "pi is held back"),
        (replace(PI, state=BoardState.QUARANTINED, busy=False), "pi is quarantined"),
        (replace(PI, state=BoardState.SUSPECT, busy=False), "pi is to be checked first"),
        (replace(PI, busy=False, unchecked=True), "pi is to be checked first"),
        (replace(PI, busy=False), "pi is free"),
    ],
)
def test_why_a_job_waits(board: BoardRow, expected: str) -> None:
    assert why_waiting(job(1), [board], 0) == expected


def test_boards_of_which_the_same_is_to_be_said_are_named_together() -> None:
    boards = [*(replace(PI, name=f"pi{number}") for number in range(5)), replace(NANO, held=True)]
    assert why_waiting(job(1), boards, 2) == (
        "pi0, pi1, pi2 and 2 more are busy; nano is held back; 2 jobs come before it"
    )
    assert why_waiting(job(1, avoid=frozenset(["pi"])), [PI], 1) == "pi failed it before; 1 job comes before it"


def test_a_job_that_no_board_will_do_for_is_told_what_they_miss() -> None:
    [found] = outlooks([job(1, selector="chip=a72, gpu")], [PI, NANO], {}, AGING_S, 10)
    assert found.why == "no board is like that; pi: has no gpu; nano: chip is a57, not a72, has no gpu"
    [found] = outlooks([job(1, board="gone")], [PI], {}, AGING_S, 10)
    assert found.why == "the farm has no board gone"

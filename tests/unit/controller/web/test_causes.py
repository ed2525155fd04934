"""Test that changed cases are grouped by cause."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
from support.nights import NEW_COMPILER, SLOW_BOARD, WRONG_LAYER, list_cases, write_nights
from support.web import asking

from hil.controller.web.history.causes import BROKE, SLOWER, ChangedCase, group_changes

WORDS = st.sampled_from(["a", "b", "c"])
CHANGES = st.lists(
    st.builds(
        ChangedCase,
        case=WORDS,
        what=st.sampled_from([BROKE, SLOWER]),
        board=WORDS,
        night=st.integers(0, 9),
        model=WORDS,
        op=st.sampled_from(["", "Conv", "Gemm"]),
        layer=st.sampled_from(["", "", "conv1"]),
        outcome=st.sampled_from(["FAIL", "RUN_ERROR"]),
        tools=st.sampled_from([(), (), ("iree 1 -> 2",)]),
        ratio=st.one_of(st.none(), st.floats(1.01, 3)),
        timed=st.integers(0, 8),
        number=st.integers(0, 99),
    ),
    max_size=30,
)


@hypothesis.given(CHANGES)
@hypothesis.settings(max_examples=60, deadline=None)
def test_grouping_keeps_every_change_once(changes: list[ChangedCase]) -> None:
    causes = group_changes(changes)
    members = [one for cause in causes for one in cause.members]
    key = repr
    assert sorted(members, key=key) == sorted(changes, key=key)
    assert all(len({one.what for one in cause.members}) == 1 and cause.members for cause in causes)
    assert all(cause.title and cause.explanation for cause in causes)


@hypothesis.given(CHANGES, st.randoms())
@hypothesis.settings(max_examples=60, deadline=None)
def test_grouping_ignores_order(changes: list[ChangedCase], rolled) -> None:
    changes = [ChangedCase(**{**vars(one), "number": number}) for number, one in enumerate(changes)]
    shuffled = list(changes)
    rolled.shuffle(shuffled)
    assert group_changes(shuffled) == group_changes(changes)


@pytest.mark.parametrize(
    ("first", "second"),
    [({"layer": "conv1"}, {"layer": "conv1", "model": "n"}), ({"op": "Conv"}, {"op": "Conv", "outcome": "RUN_ERROR"})],
)
def test_causes_with_same_subject_have_different_keys(first: dict[str, str], second: dict[str, str]) -> None:
    shared = {"case": "a", "what": BROKE, "board": "pi", "night": 5, "model": "m", "outcome": "FAIL"}
    causes = group_changes([ChangedCase(**{**shared, **one}) for one in (first, second)])
    assert len(causes) == len({cause.key for cause in causes}) == 2


def slow(board: str, count: int, *, night: int = 5, timed: int = 10) -> list[ChangedCase]:
    return [
        ChangedCase(f"case{number}", SLOWER, board, night, model="m", op="Conv", ratio=1.14, timed=timed)
        for number in range(count)
    ]


def test_most_slower_cases_of_one_board_are_one_cause() -> None:
    (cause,) = group_changes([*slow("evk1", 6), *slow("evk1", 2, night=6)[:0], *slow("evk1", 1, night=6)])
    assert (cause.kind, cause.title) == ("board", "7 of 10 cases 1.14x slower on evk1: the board")


def test_few_slower_cases_are_not_blamed_on_board() -> None:
    (cause,) = group_changes(slow("evk1", 4))
    assert (cause.kind, cause.subject) == ("operator", "Conv")


def test_slowdown_of_several_boards_is_blamed_on_commit() -> None:
    (cause,) = group_changes([*slow("evk1", 6), *slow("evk2", 7, night=6)])
    assert cause.title == "13 of 20 cases 1.14x slower on evk1, evk2: all boards: the commit"


def test_slowdowns_of_different_nights_stay_apart() -> None:
    causes = group_changes([*slow("evk1", 6), *slow("evk2", 7, night=9)])
    assert [(one.kind, one.boards) for one in causes] == [("board", ("evk2",)), ("board", ("evk1",))]


def test_bisected_layer_wins_over_tools_and_operator() -> None:
    failing = ChangedCase("m_full", BROKE, "evk1", 5, model="m", layer="conv1", outcome="FAIL", tools=("iree 1 -> 2",))
    other = ChangedCase("x_full", BROKE, "evk1", 5, model="x", outcome="FAIL", tools=("iree 1 -> 2",))
    causes = group_changes([failing, other])
    assert [one.title for one in causes] == [
        "1 case fails on evk1: conv1 is the first wrong layer by bisection",
        "1 case fails on evk1: iree 1 -> 2",
    ]


def test_whole_model_joins_its_failing_operator() -> None:
    layer = ChangedCase("m_conv", BROKE, "evk1", 5, model="m", op="Conv", outcome="FAIL")
    whole = ChangedCase("m_full", BROKE, "evk1", 6, model="m", outcome="FAIL")
    stranger = ChangedCase("x_full", BROKE, "evk1", 5, model="x", outcome="FAIL")
    causes = group_changes([layer, whole, stranger])
    assert [(one.kind, one.subject, len(one.members)) for one in causes] == [("operator", "Conv", 2), ("model", "x", 1)]


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("nights")
    write_nights(root)
    return root


def links(page: str, path: str) -> list[str]:
    return [unescape(one) for one in re.findall(rf'href="({re.escape(path)}\?[^"]*)"', page)]


def test_twelve_nights_with_three_causes_give_three_rows(nights: Path) -> None:
    cases = len(list_cases())
    with asking(nights) as client:
        page = client.get("/?since=night:2023-11-19").text
        titles = [unescape(one) for one in re.findall(r'href="/cause\?[^"]*">([^<]*)<', page)]
        assert titles == [
            "12 cases fail on evk1, evk2, rpi5: iree-base-compiler 3.13.0 -> 3.14.0",
            "6 cases fail on evk1, evk2, rpi5: conv1 is the first wrong layer by bisection",
            f"{cases} of {cases} cases 1.14x slower on evk1: the board",
        ]
        # Home page, cause, case: each cause and case is at most two clicks away.
        for cause, count in zip(links(page, "/cause"), (12, 6, cases), strict=True):
            shown = client.get(cause).text
            assert len(links(shown, "/case")) == count
            assert client.get(links(shown, "/case")[0]).status_code == 200
            assert client.get(links(shown, "/history")[0]).status_code == 200
    assert SLOW_BOARD < WRONG_LAYER < NEW_COMPILER


def test_later_baseline_hides_older_causes(nights: Path) -> None:
    with asking(nights) as client:
        page = client.get(f"/?since=label:night-{WRONG_LAYER}").text
        assert re.findall(r"(\d+) causes? of", page) == ["1"] and "iree-base-compiler" in page
        assert "No new failures" in client.get("/").text

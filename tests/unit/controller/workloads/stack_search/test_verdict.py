"""Conclude from the answers of boards which version of a part changes the answer."""

from __future__ import annotations

import pytest

from hil.controller.records.decisions.stack_search import BoardAnswer, BoardRun, TriedBoard
from hil.controller.records.stack import StackPart
from hil.controller.workloads.stack_search.run import check_part, find_answer
from hil.controller.workloads.stack_search.verdict import StackVerdict, conclude, group_by_version
from hil.errors import UsageError

DRIVERS = {"a": "1.0", "b": "1.0", "c": "2.0"}


def tried(name: str, answer: BoardAnswer, program: str = "p", **stack: str) -> TriedBoard:
    parts = [
        StackPart(name=part, version=version, source="config" if version else "unknown")
        for part, version in stack.items()
    ]
    return TriedBoard(request=name, name=name, stack=parts, program=program, answer=answer, reason="")


def concluded(*boards: TriedBoard, over: str = "driver") -> StackVerdict:
    return conclude(boards, over)


def test_wrong_version_is_named() -> None:
    boards = [tried(name, "fail" if name == "c" else "pass", driver=version) for name, version in DRIVERS.items()]
    found = concluded(*boards)
    assert (found.conclusion, found.found, found.exit_code) == ("found", ("2.0",), 1)
    assert found.text == "driver 2.0 changes the answer: wrong on c, correct with 1.0 on a, b"
    assert [(one.version, one.passing, one.failing) for one in group_by_version(boards, "driver")] == [
        ("1.0", ["a", "b"], []),
        ("2.0", [], ["c"]),
    ]


def test_other_part_with_same_boards_confounds() -> None:
    found = concluded(tried("a", "pass", driver="1", firmware="5"), tried("b", "fail", driver="2", firmware="6"))
    assert (found.conclusion, found.confounders) == ("confounded", ("firmware",))
    assert "confounded with firmware (6 fails, 5 passes)" in found.text
    assert found.hint == "run on a board with driver 1 and the firmware of b"


def test_part_on_good_and_bad_boards_does_not_confound() -> None:
    found = concluded(
        tried("a", "pass", driver="1", firmware="5"),
        tried("b", "pass", driver="1", firmware="6"),
        tried("c", "fail", driver="2", firmware="6"),
    )
    assert (found.conclusion, found.confounders) == ("found", ())


def test_unknown_part_does_not_confound() -> None:
    found = concluded(tried("a", "pass", driver="1", firmware=""), tried("b", "fail", driver="2", firmware="6"))
    assert found.conclusion == "found"


def test_different_programs_confound() -> None:
    found = concluded(tried("a", "pass", "p", driver="1"), tried("b", "fail", "q", driver="2"))
    assert (found.conclusion, found.confounders) == ("confounded", ("program",))


def test_part_with_mixed_answers_is_not_the_cause() -> None:
    found = concluded(tried("a", "pass", driver="1", firmware="5"), tried("b", "fail", driver="1", firmware="6"))
    assert (found.conclusion, found.hint) == ("not the part", "search over firmware: --over firmware")
    assert "firmware (6 fails, 5 passes)" in found.text
    assert "--over board" in concluded(tried("a", "pass", driver="1"), tried("b", "fail", driver="1")).hint


@pytest.mark.parametrize(("answer", "conclusion", "code"), [("pass", "all pass", 0), ("fail", "all fail", 1)])
def test_equal_answers_exclude_the_part(answer: BoardAnswer, conclusion: str, code: int) -> None:
    found = concluded(tried("a", answer, driver="1"), tried("b", answer, driver="2"))
    assert (found.conclusion, found.exit_code) == (conclusion, code)


@pytest.mark.parametrize(
    ("answers", "versions", "conclusion", "code"),
    [
        (("pass", "pass"), ("1", "1"), "all pass", 0),
        (("pass", "pass"), ("1", ""), "all pass", 0),
        (("pass", "pass"), ("", ""), "all pass", 0),
        (("pass", "board error"), ("1", ""), "not comparable", 5),
        (("pass", "unstable"), ("1", "2"), "not comparable", 5),
        (("fail", "fail"), ("1", "1"), "not comparable", 1),
        (("pass", "fail"), ("", ""), "not comparable", 1),
        (("pass", "fail"), ("1", ""), "not comparable", 1),
    ],
)
def test_answers_decide_exit_code_of_incomparable_boards(
    answers: tuple[BoardAnswer, ...], versions: tuple[str, ...], conclusion: str, code: int
) -> None:
    boards = [
        tried(name, answer, driver=version) for name, answer, version in zip("ab", answers, versions, strict=True)
    ]
    found = concluded(*boards)
    assert (found.conclusion, found.exit_code) == (conclusion, code)
    assert ("driver" in found.text, "driver" in found.hint) == (True, True)


def test_single_version_is_reported() -> None:
    found = concluded(tried("a", "pass", driver="1"), tried("b", "pass", driver="1"))
    assert found.text == "all boards pass, but all judged boards have the same driver: 1"


def test_boards_without_version_or_answer_are_excluded() -> None:
    unstable = tried("c", "unstable", driver="2")
    found = concluded(tried("a", "pass", driver="1"), tried("b", "fail", driver="2"), unstable, tried("d", "fail"))
    assert (found.conclusion, found.found) == ("found", ("2",))
    (_, second, unknown) = group_by_version([tried("a", "pass", driver="1"), unstable, tried("d", "fail")], "driver")
    assert (second.excluded, unknown.version, unknown.failing) == (["c"], "", ["d"])


def test_search_without_answers_reports_why() -> None:
    assert "[stack] driver" in concluded(tried("a", "fail"), tried("b", "pass")).hint
    assert concluded(tried("a", "board error")).exit_code == 4
    assert concluded(tried("a", "not judged")).exit_code == 5


def test_board_axis_names_boards_and_differences() -> None:
    found = concluded(tried("a", "pass", driver="1"), tried("b", "fail", driver="2"), over="board")
    assert found.text == "wrong on b, correct on a; differences: driver (2 fails, 1 passes)"
    assert found.found == ("b",)


def test_unknown_part_is_refused_with_similar_name() -> None:
    stack = tried("a", "pass", driver="", rack="1").stack
    for over in ("driver", "rack", "npu", "board"):
        check_part(over, ["npu"], stack)
    with pytest.raises(UsageError, match="no board has the part 'drivr'") as caught:
        check_part("drivr", ["npu"], stack)
    assert caught.value.hint == "did you mean 'driver'? known: board, driver, rack, npu"


@pytest.mark.parametrize(
    ("runs", "answer"),
    [
        ([("PASS", "x"), ("PASS", "x")], "pass"),
        ([("FAIL", "x"), ("FAIL", "x")], "fail"),
        ([("RUN_CRASH", ""), ("RUN_CRASH", "")], "fail"),
        ([("PASS", "x"), ("FAIL", "y")], "unstable"),
        ([("FAIL", "x"), ("FAIL", "y")], "unstable"),
        ([("PASS", "x"), ("BOARD_LOST", "")], "board error"),
        ([("BLIND", "x"), ("BLIND", "x")], "not judged"),
    ],
)
def test_runs_of_a_board_give_an_answer(runs: list[tuple[str, str]], answer: str) -> None:
    found = [BoardRun(outcome=outcome, reason="", outputs=outputs) for outcome, outputs in runs]
    assert find_answer(found) == answer

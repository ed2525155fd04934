"""Which board runs what next, and what runs that confirm a mismatch say."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hil.controller.pipeline.case import Case
from hil.controller.pipeline.options import Options
from hil.controller.workloads.suites.tasks import Task, TaskQueue, confirmed, next_confirmation


def task(name: str = "case", *boards: str, wrong_on: str = "", confirmations=()) -> Task:
    case = Case(name, Path(name), Options(), Path())
    found = Task(case, boards=boards, wrong_on=wrong_on, confirmations=list(confirmations))
    found.wrong = case if wrong_on else None
    return found


def test_first_come_first_served_by_whoever_may_run_it():
    queue = TaskQueue(["a", "b"])
    tasks = [task("1"), task("2", "b"), task("3")]
    assert all(queue.put(one) for one in tasks)
    assert [queue.take("a"), queue.take("a"), queue.take("b")] == [tasks[0], tasks[2], tasks[1]]


def test_a_task_for_a_board_that_left_is_refused():
    queue = TaskQueue(["a", "b"])
    assert queue.leave("b") == []
    assert not queue.put(task("1", "b"))
    assert queue.put(task("2", "a", "b"))


def test_a_board_that_leaves_strands_what_only_it_could_run():
    queue = TaskQueue(["a", "b"])
    mine, anybodys = task("1", "b"), task("2")
    queue.put(mine)
    queue.put(anybodys)
    assert queue.leave("b") == [mine]
    assert queue.leave("a") == [anybodys]
    assert queue.alive == () and not queue.put(task("3"))


def test_who_waits_for_a_task_goes_home_when_the_queue_is_closed():
    queue = TaskQueue(["a"])
    found = []
    waiter = threading.Thread(target=lambda: found.append(queue.take("a")))
    waiter.start()
    queue.close()
    waiter.join(10)
    assert found == [None] and not queue.put(task())


def test_who_puts_waits_for_room():
    queue = TaskQueue(["a"])
    queue.put(task("1"))
    put = threading.Event()
    filler = threading.Thread(target=lambda: (queue.put(task("2"), most=1), put.set()))
    filler.start()
    assert not put.wait(0.2)
    queue.take("a")
    assert put.wait(60)
    filler.join(10)


@pytest.mark.parametrize(
    ("done", "wanted", "boards", "expected"),
    [
        ([], 0, ("a", "b"), None),
        ([], 1, ("a", "b"), ("a",)),
        ([("a", True)], 2, ("a", "b"), ("b",)),
        ([("a", True)], 2, ("a",), ("a",)),
        ([("a", True)], 1, ("a", "b"), None),
        ([("a", True), ("b", False)], 3, ("a", "b", "c"), ("a",)),
        ([("a", True), ("b", False), ("a", True)], 4, ("a", "b", "c"), ("b", "c")),
        ([], 2, ("b",), ("b",)),  # the board that was wrong has left
        ([], 2, (), None),
    ],
)
def test_a_mismatch_is_run_again_on_the_same_board_and_on_another_in_turns(done, wanted, boards, expected):
    assert next_confirmation(task(wrong_on="a", confirmations=done), wanted, boards) == expected


@pytest.mark.parametrize(
    ("confirmations", "word"),
    [
        ([], ""),
        ([("a", True)], "always wrong"),
        ([("a", True), ("b", True)], "always wrong"),
        ([("a", True), ("b", False)], "one bad board"),
        ([("a", False), ("b", False)], "flaky"),
        ([("a", False), ("b", True)], "flaky"),
        ([("a", True), ("b", False), ("a", False)], "flaky"),
        ([("b", False)], "flaky"),
        ([("a", False)], "flaky"),
    ],
)
def test_what_confirming_says(confirmations, word):
    assert confirmed("a", confirmations) == word

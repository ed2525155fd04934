"""Task queue of boards, and confirmation of mismatches."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hil.controller.pipeline.case import Case
from hil.controller.pipeline.settings.options import Options
from hil.controller.workloads.suites.tasks import Task, TaskQueue, choose_next_confirmation, summarize_confirmations


def task(name: str = "case", *boards: str, wrong_on: str = "", confirmations=()) -> Task:
    case = Case(name, Path(name), Options(), Path())
    found = Task(case, boards=boards, wrong_on=wrong_on, confirmations=list(confirmations))
    found.wrong = case if wrong_on else None
    return found


def test_queue_serves_first_task_a_board_may_run():
    queue = TaskQueue(["a", "b"])
    tasks = [task("1"), task("2", "b"), task("3")]
    assert all(queue.put(one) for one in tasks)
    assert [queue.take("a"), queue.take("a"), queue.take("b")] == [tasks[0], tasks[2], tasks[1]]


def test_queue_rejects_task_of_departed_board():
    queue = TaskQueue(["a", "b"])
    assert queue.leave("b") == []
    assert not queue.put(task("1", "b"))
    assert queue.put(task("2", "a", "b"))


def test_leaving_board_returns_exclusive_tasks():
    queue = TaskQueue(["a", "b"])
    mine, anybodys = task("1", "b"), task("2")
    queue.put(mine)
    queue.put(anybodys)
    assert queue.leave("b") == [mine]
    assert queue.leave("a") == [anybodys]
    assert queue.alive == () and not queue.put(task("3"))


def test_closed_queue_releases_waiting_board():
    queue = TaskQueue(["a"])
    found = []
    waiter = threading.Thread(target=lambda: found.append(queue.take("a")))
    waiter.start()
    queue.close()
    waiter.join(60)
    assert found == [None] and not queue.put(task())


def test_full_queue_blocks_put():
    queue = TaskQueue(["a"])
    queue.put(task("1"))
    put = threading.Event()
    filler = threading.Thread(target=lambda: (queue.put(task("2"), most=1), put.set()))
    filler.start()
    assert not put.wait(0.2)
    queue.take("a")
    assert put.wait(60)
    filler.join(60)


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
        ([], 2, ("b",), ("b",)),  # the board with the mismatch has left
        ([], 2, (), None),
    ],
)
def test_confirmation_alternates_same_and_other_board(done, wanted, boards, expected):
    assert choose_next_confirmation(task(wrong_on="a", confirmations=done), wanted, boards) == expected


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
def test_confirmed_classifies_repeated_mismatches(confirmations, word):
    assert summarize_confirmations("a", confirmations) == word

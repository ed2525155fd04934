"""Turns on boards: one at a time, first come first served, even if waiting processes die."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from support.waiting import eventually

from hil.testing.pytest_plugin.boards import BoardLocks

# Takes a turn, prints the board, and keeps the turn until stdin closes.
HOLDER = """
import sys
from pathlib import Path
from hil.testing.pytest_plugin.boards import BoardLocks
turns = BoardLocks(Path(sys.argv[1]), sys.argv[2:])
print(turns.take(sys.argv[2:]), flush=True)
sys.stdin.read()
"""


def holder(folder: Path, *boards: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(folder), *boards]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str], *, kill: bool = False) -> None:
    if kill:
        process.kill()
    process.communicate(timeout=30)


def tickets(folder: Path) -> list[str]:
    return sorted(ticket.name for ticket in folder.rglob("*.ticket"))


def test_board_locks_assign_each_board_to_single_holder(tmp_path):
    turns = BoardLocks(tmp_path, ["a", "b"])
    other = holder(tmp_path, "a", "b")
    assert said(other) == "a"
    assert turns.take(["a", "b"]) == "b"
    turns.end("b")
    assert turns.take(["a", "b"]) == "b"
    end(other)
    turns.end("b")
    assert turns.take(["a", "b"]) == "a"
    assert not turns.is_wanted()


def test_board_lock_ends_with_killed_process(tmp_path):
    other = holder(tmp_path, "a")
    assert said(other) == "a"
    end(other, kill=True)
    assert BoardLocks(tmp_path, ["a"]).take(["a"]) == "a"


def test_board_locks_forget_killed_waiter(tmp_path):
    turns = BoardLocks(tmp_path, ["a"])
    turns.take(["a"])
    first = holder(tmp_path, "a")
    eventually(turns.is_wanted)
    end(first, kill=True)
    assert not turns.is_wanted()
    assert tickets(tmp_path) == []


def test_board_locks_serve_waiters_in_order(tmp_path):
    turns = BoardLocks(tmp_path, ["a"])
    turns.take(["a"])
    first = holder(tmp_path, "a")
    eventually(lambda: len(tickets(tmp_path)) == 1)
    second = holder(tmp_path, "a")
    eventually(lambda: len(tickets(tmp_path)) == 2)
    turns.end("a")
    taken: list[str] = []
    thread = threading.Thread(target=lambda: taken.append(turns.take(["a"])))
    thread.start()
    assert said(first) == "a"
    end(first)
    assert said(second) == "a"
    assert not taken
    end(second)
    thread.join(30)
    assert taken == ["a"]


def test_board_locks_of_different_boards_are_independent(tmp_path):
    one, other = BoardLocks(tmp_path, ["a"]), BoardLocks(tmp_path, ["b"])
    one.take(["a"])
    assert other.take(["b"]) == "b"

from __future__ import annotations

import queue
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hil.controller.devices.answers import LOG_CHARACTERS
from hil.controller.devices.call import CallFailed
from hil.controller.devices.worker_log import WorkerLog
from hil.controller.storage import live
from hil.controller.storage.isolated import Isolated, IsolatedFailure


def test_a_log_is_shown_line_by_line_from_where_it_ended(tmp_path: Path) -> None:
    (tmp_path / "net" / "logs").mkdir(parents=True)
    log = tmp_path / "net" / "logs" / "compile.log"
    log.write_bytes(b"of an earlier call\n")
    shown: list[str] = []
    with live.showing(shown.append):
        follower = live.LogFollower(log)
        for piece in (b"one\ntw", b"o\n", b"half \xff"):
            with log.open("ab") as file:
                file.write(piece)
            follower.look()
        assert shown == ["net: compile | one", "net: compile | two"]
        follower.look(end=True)
        follower.look(end=True)
    assert shown[2:] == ["net: compile | half \ufffd"] and not live.is_shown()


def test_what_an_isolated_call_prints_is_shown_before_it_ends(isolated: Isolated, tmp_path: Path) -> None:
    """The called function runs a program that says what it waits for, and goes on once somebody has seen that."""
    seen: queue.SimpleQueue[str] = queue.SimpleQueue()
    go_on = tmp_path / "go-on"
    script = f"echo begun; while [ ! -e {go_on} ]; do sleep 0.05; done; echo ended"
    arguments: dict[str, Any] = {"args": ["sh", "-c", script]}

    def call() -> None:
        # What it returns JSON cannot say.
        with pytest.raises(IsolatedFailure):
            isolated.call("subprocess:run", arguments, timeout=60.0, log=tmp_path / "tool.log")

    with live.showing(seen.put):
        thread = threading.Thread(target=call)
        thread.start()
        assert seen.get(timeout=30) == "tool | begun"
        go_on.touch()
        thread.join(30)
    assert seen.get(timeout=1) == "tool | ended"


class Stream:
    """A stream of lines, as a client has it."""

    def __init__(self) -> None:
        self.lines: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        line = self.lines.get()
        if line is None:
            raise CallFailed("CANCELLED", "cancelled")
        return line

    def cancel(self) -> None:
        self.lines.put(None)


def test_a_worker_is_heard_from_its_first_line_to_its_last_and_no_other() -> None:
    stream = Stream()
    kept = {"p1": ["early", "in time", "last"]}
    client: Any = SimpleNamespace(follow_logs=lambda: stream, logs=lambda program: kept[program])
    shown: queue.SimpleQueue[str] = queue.SimpleQueue()

    def written(program: str, text: str) -> None:
        stream.lines.put(SimpleNamespace(program_id=program, text=text))

    with live.showing(shown.put):
        log = WorkerLog("rpi5", client)
        written("p0", "of somebody else")
        written("p1", "early")
        log.add("p1")
        written("p1", "in time")
        assert [shown.get(timeout=5) for _ in range(2)] == ["rpi5 | early", "rpi5 | in time"]
        log.finish("p1")
        assert shown.get(timeout=5) == "rpi5 | last"
        written("p1", "last")
        log.close()
    assert shown.empty()


def test_a_board_that_never_stops_telling_of_other_programs_takes_little_memory() -> None:
    stream = Stream()
    client: Any = SimpleNamespace(follow_logs=lambda: stream, logs=lambda program: [])
    log = WorkerLog("rpi5", client)
    for number in range(40):
        stream.lines.put(SimpleNamespace(program_id=f"p{number}", text="x" * (LOG_CHARACTERS // 10)))
    stream.lines.put(SimpleNamespace(program_id="last", text="y"))
    stream.lines.put(None)
    log._thread.join(30)
    assert sum(len(text) for _, text in log._early) <= LOG_CHARACTERS
    assert log._early[-1] == ("last", "y")
    log.close()


def test_a_program_that_was_loaded_when_nobody_looked_is_not_shown() -> None:
    client: Any = SimpleNamespace(follow_logs=Stream, logs=lambda program: ["unseen"])
    shown: list[str] = []
    with live.showing(shown.append):
        log = WorkerLog("rpi5", client)
        log.finish("p1")
        log.close()
    assert shown == []

from __future__ import annotations

import queue
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hil.controller.devices.agent_client.answers import LOG_CHARACTERS
from hil.controller.devices.agent_client.call import CallFailed
from hil.controller.devices.worker_log import WorkerLog
from hil.controller.storage.isolation.isolated import Isolated, IsolatedFailure
from hil.controller.storage.screen import live


def test_log_follower_shows_new_lines(tmp_path: Path) -> None:
    (tmp_path / "net" / "logs").mkdir(parents=True)
    log = tmp_path / "net" / "logs" / "compile.log"
    log.write_bytes(b"of an earlier call\n")
    shown: list[str] = []
    with live.show_output(shown.append):
        follower = live.LogFollower(log)
        for piece in (b"one\ntw", b"o\n", b"half \xff"):
            with log.open("ab") as file:
                file.write(piece)
            follower.show_new_lines()
        assert shown == ["net: compile | one", "net: compile | two"]
        follower.show_new_lines(end=True)
        follower.show_new_lines(end=True)
    assert shown[2:] == ["net: compile | half \ufffd"] and not live.is_shown()


def test_isolated_call_output_appears_while_running(isolated: Isolated, tmp_path: Path) -> None:
    """Run a program that prints a line and waits until the test has read it."""
    seen: queue.SimpleQueue[str] = queue.SimpleQueue()
    go_on = tmp_path / "go-on"
    script = f"echo begun; while [ ! -e {go_on} ]; do sleep 0.05; done; echo ended"
    arguments: dict[str, Any] = {"args": ["sh", "-c", script]}

    def call() -> None:
        # JSON cannot encode its result.
        with pytest.raises(IsolatedFailure):
            isolated.call("subprocess:run", arguments, timeout=60.0, log=tmp_path / "tool.log")

    with live.show_output(seen.put):
        thread = threading.Thread(target=call)
        thread.start()
        assert seen.get(timeout=30) == "tool | begun"
        go_on.touch()
        thread.join(30)
    assert seen.get(timeout=60) == "tool | ended"


class Stream:
    """Stream of log lines like a client's."""

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


def test_worker_log_shows_all_lines_of_program() -> None:
    stream = Stream()
    kept = {"p1": ["early", "in time", "last"]}
    client: Any = SimpleNamespace(follow_logs=lambda: stream, logs=lambda program: kept[program])
    shown: queue.SimpleQueue[str] = queue.SimpleQueue()

    def written(program: str, text: str) -> None:
        stream.lines.put(SimpleNamespace(program_id=program, text=text))

    with live.show_output(shown.put):
        log = WorkerLog("rpi5", client)
        written("p0", "of somebody else")
        written("p1", "early")
        log.add("p1")
        written("p1", "in time")
        assert [shown.get(timeout=60) for _ in range(2)] == ["rpi5 | early", "rpi5 | in time"]
        log.finish("p1")
        assert shown.get(timeout=60) == "rpi5 | last"
        written("p1", "last")
        log.close()
    assert shown.empty()


def test_worker_log_limits_memory_for_other_programs() -> None:
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


def test_worker_log_hides_program_loaded_before() -> None:
    client: Any = SimpleNamespace(follow_logs=Stream, logs=lambda program: ["unseen"])
    shown: list[str] = []
    with live.show_output(shown.append):
        log = WorkerLog("rpi5", client)
        log.finish("p1")
        log.close()
    assert shown == []

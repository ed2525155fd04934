"""Test a process that forks children, and the end of the children in all cases."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.waiting import eventually

PARENT = """
import os, signal, sys, time
from pathlib import Path
from hil.controller.farm.local.processes import ForkedProcess, PreforkSupervisor, end_with_parent, make_module_main
folder = Path(sys.argv[1])
def say(text):
    with open(folder / "said", "a") as file: file.write(text + "\\n")
def note(name):
    with open(folder / name, "a") as file: file.write(f"{os.getpid()}\\n")
def steady(name):
    def run():
        end_with_parent()
        note(name)
        while True: time.sleep(60)
    return run
"""


class Parent:
    """Process with children, each of which writes its process id to a file with its name."""

    def __init__(self, folder: Path, code: str) -> None:
        self.folder = folder
        command = [sys.executable, "-c", PARENT + code, str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def pids(self, name: str) -> list[int]:
        path = self.folder / name
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def said(self) -> str:
        path = self.folder / "said"
        return path.read_text() if path.exists() else ""


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Parent]]:
    started: list[Parent] = []

    def begin(code: str) -> Parent:
        started.append(Parent(tmp_path, code))
        return started[-1]

    yield begin
    for parent in started:
        parent.process.kill()
        parent.process.wait()


TWO = """
both = [ForkedProcess("a", steady("a")), ForkedProcess("b", steady("b"), rank=1)]
PreforkSupervisor(both, say).run()
say("over")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_supervisor_ends_children_on_signal(start, number):
    parent = start(TWO)
    eventually(lambda: parent.pids("a") and parent.pids("b"))
    parent.process.send_signal(number)
    assert parent.process.wait(20) == 0 and parent.said == "over\n"
    assert all(gone(pid) for pid in parent.pids("a") + parent.pids("b"))


def test_children_end_with_killed_supervisor(start):
    parent = start(TWO)
    eventually(lambda: parent.pids("a") and parent.pids("b"))
    parent.process.kill()
    eventually(lambda: all(gone(pid) for pid in parent.pids("a") + parent.pids("b")))


@pytest.mark.ci
def test_supervisor_restarts_failed_child_with_growing_pauses(start):
    parent = start("""
def weak():
    note("weak")
    os._exit(3)
PreforkSupervisor([ForkedProcess("a", steady("a")), ForkedProcess("weak", weak)], say).run()
""")
    eventually(lambda: parent.pids("a") and len(parent.pids("weak")) >= 4)
    assert len(parent.pids("a")) == 1
    pauses = [
        float(line.split()[-2]) for line in parent.said.splitlines() if line.startswith("weak ended with exit code 3")
    ]
    assert pauses[:3] == [0.4, 0.8, 1.6]


@pytest.mark.ci
def test_supervisor_limits_restart_pause(start):
    parent = start("""
def weak():
    note("weak")
    os._exit(3)
PreforkSupervisor([ForkedProcess("weak", weak, most_pause_s=0.3)], say).run()
""")
    eventually(lambda: len(parent.pids("weak")) >= 5)
    assert {line.split()[-2] for line in parent.said.splitlines()} == {"0.3"}


def test_supervisor_reports_and_restarts_killed_child(start):
    parent = start(TWO)
    eventually(lambda: parent.pids("a"))
    os.kill(parent.pids("a")[0], signal.SIGKILL)
    eventually(lambda: len(parent.pids("a")) == 2)
    assert "a was killed by SIGKILL; restarting in" in parent.said


def test_supervisor_ends_descendants_of_killed_child(start):
    parent = start("""
import subprocess
def family():
    end_with_parent()
    process = subprocess.Popen(["sleep", "600"])
    (folder / "sleep").write_text(str(process.pid))
    note("family")
    while True: time.sleep(60)
PreforkSupervisor([ForkedProcess("family", family)], say).run()
""")
    eventually(lambda: parent.pids("family"))
    first = int((parent.folder / "sleep").read_text())
    os.kill(parent.pids("family")[0], signal.SIGKILL)
    eventually(lambda: gone(first) and len(parent.pids("family")) == 2)


@pytest.mark.ci
def test_supervisor_kills_stubborn_child_before_higher_ranks(start):
    parent = start("""
def stubborn():
    signal.signal(signal.SIGTERM, lambda *_: say("no"))
    note("stubborn")
    while True: time.sleep(60)
def last():
    signal.signal(signal.SIGTERM, lambda *_: (say("last"), os._exit(0)))
    note("last")
    while True: time.sleep(60)
PreforkSupervisor([ForkedProcess("last", last, rank=1), ForkedProcess("stubborn", stubborn)], say, stop_s=4).run()
""")
    eventually(lambda: parent.pids("stubborn") and parent.pids("last"))
    parent.process.terminate()
    assert parent.process.wait(60) == 0
    assert parent.said.split() == ["no", "last"] and gone(parent.pids("stubborn")[0])


def test_supervisor_ends_stopped_child(start):
    parent = start(TWO)
    eventually(lambda: parent.pids("a"))
    os.kill(parent.pids("a")[0], signal.SIGSTOP)
    parent.process.terminate()
    assert parent.process.wait(20) == 0 and gone(parent.pids("a")[0])


def test_module_main_runs_module_with_arguments_and_log(start):
    (parent_folder := start("pass")).process.wait(20)
    (parent_folder.folder / "printer.py").write_text("import sys\ndef main(): print(sys.argv[1:], flush=True)\n")
    parent = start("""
sys.path.insert(0, str(folder))
PreforkSupervisor([ForkedProcess("p", make_module_main("printer", ["--x", "1"]), folder / "log")], say).run()
""")
    eventually(lambda: (parent.folder / "log").exists() and (parent.folder / "log").read_text())
    assert (parent.folder / "log").read_text().splitlines()[0] == "['--x', '1']"

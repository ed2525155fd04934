"""Processes that are kept running, and ended for good."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import eventually

from hil.controller.farm.processes import SupervisedProcess, end_noted, start_time

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def keep(tmp_path):
    made: list[SupervisedProcess] = []

    def make(*command: str) -> tuple[SupervisedProcess, list[str]]:
        said: list[str] = []
        kept = SupervisedProcess("thing", command, os.environ, tmp_path, said.append)
        made.append(kept)
        kept.start()
        return kept, said

    yield make
    for kept in made:
        kept.stop()


def test_what_dies_is_started_again_and_told(keep):
    kept, said = keep(*SLEEPS)
    first = kept.pid
    assert kept.look()
    os.kill(first, signal.SIGKILL)
    eventually(lambda: kept.look() and kept.pid != first)
    assert said == [f"the thing was killed by SIGKILL; it starts again in 1 s (see {kept.log})"]


def test_what_dies_at_once_is_started_ever_later(keep):
    kept, said = keep(sys.executable, "-c", "print('no', flush=True); raise SystemExit(3)")
    eventually(lambda: kept.look() is None or len(said) == 2)
    assert "ended with exit code 3; it starts again in 1 s" in said[0]
    assert "in 2 s" in said[1]
    assert kept.tail() == "no\nno"


def test_ending_it_ends_all_that_it_started_though_it_will_not_hear(keep, tmp_path, monkeypatch):
    monkeypatch.setattr("hil.controller.farm.processes._STOP_S", 0.5)
    program = (
        "import pathlib, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"child = subprocess.Popen({SLEEPS!r})\n"
        f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    kept, _ = keep(sys.executable, "-c", program)
    note = tmp_path / "child"
    eventually(lambda: note.exists() and note.read_text())
    leader, child = kept.pid, int(note.read_text())
    assert start_time(child)
    kept.stop()
    eventually(lambda: not start_time(leader) and not start_time(child))
    assert kept.pid is None
    assert not (tmp_path / "thing.pid").exists()


def test_what_a_killed_keeper_left_is_ended_by_the_next(keep, tmp_path):
    left, _ = keep(*SLEEPS)
    pid = left.pid
    assert json.loads((tmp_path / "thing.pid").read_text()) == {"pid": pid, "born": start_time(pid)}
    # Even one that hangs.
    os.kill(pid, signal.SIGSTOP)
    next_one, _ = keep(*SLEEPS)
    eventually(lambda: not start_time(pid))
    assert next_one.pid not in (None, pid)


def test_a_number_that_is_another_process_s_by_now_is_left_alone(tmp_path):
    other = subprocess.Popen(SLEEPS)
    try:
        note = tmp_path / "thing.pid"
        note.write_text(json.dumps({"pid": other.pid, "born": "1"}))
        end_noted(note)
        assert other.poll() is None
        assert not note.exists()
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x", "born": "1"}'])
def test_a_note_that_says_nothing_is_thrown_away(tmp_path: Path, text):
    note = tmp_path / "thing.pid"
    note.write_text(text)
    end_noted(note)
    assert not note.exists()

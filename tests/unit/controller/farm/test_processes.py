"""Test processes that hil restarts after a failure and ends completely."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import eventually

from hil.controller.farm.local.processes import SupervisedProcess, end_noted, start_time

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


@pytest.mark.ci
def test_process_restarts_after_kill_and_reports(keep):
    kept, said = keep(*SLEEPS)
    first = kept.pid
    assert kept.check()
    os.kill(first, signal.SIGKILL)
    eventually(lambda: kept.check() and kept.pid != first)
    assert said == [f"the thing was killed by SIGKILL; restarting in 1 s (see {kept.log})"]


@pytest.mark.ci
def test_process_restart_delay_grows_after_failures(keep):
    kept, said = keep(sys.executable, "-c", "print('no', flush=True); raise SystemExit(3)")
    eventually(lambda: kept.check() is None or len(said) == 2)
    assert "ended with exit code 3; restarting in 1 s" in said[0]
    assert "in 2 s" in said[1]
    assert kept.tail() == "no\nno"


def test_process_stop_kills_stubborn_process_and_children(keep, tmp_path, monkeypatch):
    monkeypatch.setattr("hil.controller.farm.local.processes._STOP_SECONDS", 0.5)
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


def test_process_start_ends_orphan_of_killed_supervisor(keep, tmp_path):
    left, _ = keep(*SLEEPS)
    pid = left.pid
    assert json.loads((tmp_path / "thing.pid").read_text()) == {"pid": pid, "born": start_time(pid)}
    # Stop it, so that it hangs.
    os.kill(pid, signal.SIGSTOP)
    next_one, _ = keep(*SLEEPS)
    eventually(lambda: not start_time(pid))
    assert next_one.pid not in (None, pid)


def test_end_noted_spares_process_with_reused_number(tmp_path):
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
def test_end_noted_deletes_malformed_note(tmp_path: Path, text):
    note = tmp_path / "thing.pid"
    note.write_text(text)
    end_noted(note)
    assert not note.exists()


def test_process_keeps_message_of_invalid_settings(keep):
    kept, said = keep(sys.executable, "-c", "print('board b is unknown', flush=True); raise SystemExit(2)")
    eventually(lambda: kept.check() is None or bool(kept.usage_error))
    assert (kept.usage_error, said[-1]) == ("board b is unknown", "board b is unknown")

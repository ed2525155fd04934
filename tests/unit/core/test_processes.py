"""Processes that are ended, and what is told of their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from hil.core import processes
from hil.core.processes import exit_text, signal_group, wait_or_kill


@pytest.mark.parametrize(
    ("code", "said"),
    [(0, "ended with exit code 0"), (-9, "was killed by SIGKILL"), (-40, "was killed by signal 40")],
)
def test_how_a_process_ended_is_told_whatever_killed_it(code, said):
    assert exit_text(code) == said


def started(code: str, **options) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True, **options)
    process.stdout.readline()
    return process


def test_a_process_that_ends_in_time_is_not_killed():
    with started("print(flush=True); raise SystemExit(3)") as process:
        assert wait_or_kill(process, 30) == 3


@pytest.mark.parametrize("group", [False, True])
def test_one_that_goes_on_is_killed(group):
    with started("import time; print(flush=True); time.sleep(600)") as process:
        assert wait_or_kill(process, 0.01, group=group) == -signal.SIGKILL


def test_its_group_goes_with_it():
    code = "import os, time; os.fork(); print(os.getpid(), flush=True); time.sleep(600)"
    with started(code) as process:
        wait_or_kill(process, 0.01, group=True)
        assert process.stdout.read() is not None  # the end comes once nobody has the pipe: the child is gone, too


def test_a_group_that_is_gone_is_nobodys_error():
    with started("print()") as process:
        process.wait(30)
    signal_group(process.pid)
    assert os.getpid() != process.pid


@pytest.mark.parametrize("version", [(3, 10), sys.version_info])
def test_a_module_is_run_with_its_arguments_and_nothing_of_the_working_directory(version, tmp_path, monkeypatch):
    monkeypatch.setattr(processes.sys, "version_info", version)
    command = processes.module_command("json.tool", "--no-ensure-ascii", "in put.json")
    monkeypatch.undo()
    for name in ("runpy", "json", "argparse"):
        (tmp_path / f"{name}.py").write_text("open('it ran', 'w')")
    (tmp_path / "in put.json").write_text('{"a": "²"}')
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "²" in done.stdout
    assert not (tmp_path / "it ran").exists()

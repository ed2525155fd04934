"""Ending processes, and reporting how they ended."""

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
def test_exit_text_describes_exit_code_or_signal(code, said):
    assert exit_text(code) == said


def started(code: str, **options) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True, **options)
    process.stdout.readline()
    return process


def test_wait_or_kill_returns_exit_code_in_time():
    with started("print(flush=True); raise SystemExit(3)") as process:
        assert wait_or_kill(process, 30) == 3


@pytest.mark.parametrize("group", [False, True])
def test_wait_or_kill_kills_running_process(group):
    with started("import time; print(flush=True); time.sleep(600)") as process:
        assert wait_or_kill(process, 0.01, group=group) == -signal.SIGKILL


def test_wait_or_kill_kills_whole_group():
    code = "import os, time; os.fork(); print(os.getpid(), flush=True); time.sleep(600)"
    with started(code) as process:
        wait_or_kill(process, 0.01, group=True)
        assert (
            process.stdout.read() is not None
        )  # EOF arrives after the last writer exits, so the child has ended as well


def test_signal_group_ignores_ended_group():
    with started("print()") as process:
        process.wait(30)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    signal_group(process.pid)


@pytest.mark.parametrize("version", [(3, 10), sys.version_info])
def test_module_command_ignores_modules_in_working_directory(version, tmp_path, monkeypatch):
    monkeypatch.setattr(processes.sys, "version_info", version)
    command = processes.make_module_command("json.tool", "--no-ensure-ascii", "in put.json")
    monkeypatch.undo()
    for name in ("runpy", "json", "argparse"):
        (tmp_path / f"{name}.py").write_text("open('it ran', 'w')")
    (tmp_path / "in put.json").write_text('{"a": "²"}')
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "²" in done.stdout
    assert not (tmp_path / "it ran").exists()

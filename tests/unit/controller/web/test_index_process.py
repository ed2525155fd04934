"""Test the index process: it restarts after a kill and ends with the server."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.waiting import allowed_s, eventually
from support.web import write_suite

from hil.controller.web.index.index import IndexReader
from hil.controller.web.index.index_process import IndexProcess
from hil.controller.web.index.sessions import SessionFilter, list_sessions
from hil.core.processes import make_module_command
from hil.errors import StorageError


def ids(index: Path) -> list[str]:
    with IndexReader(index).open_snapshot() as database:
        return sorted(one.id for one in list_sessions(database, SessionFilter()).sessions)


@pytest.mark.ci
def test_index_process_indexes_reports_progress_and_ends(tmp_path: Path) -> None:
    index = tmp_path / "index" / "one.sqlite"
    write_suite(tmp_path / "runs", "first", [{"id": "a"}, {"id": "b"}])
    with IndexProcess(index, [tmp_path / "runs"]) as process:
        progress, number = process.progress, process.pid
        eventually(lambda: progress.first_done)
        assert (progress.sessions, progress.read, progress.cases) == (1, 1, 2)
        assert ids(index) == ["first"]
        seen = progress.generation
        write_suite(tmp_path / "runs", "second", [{"id": "a"}])
        eventually(lambda: ids(index) == ["first", "second"] and progress.generation > seen)
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


@pytest.mark.ci
def test_index_process_restarts_after_kill(tmp_path: Path) -> None:
    index = tmp_path / "index.sqlite"
    (tmp_path / "runs").mkdir()
    with IndexProcess(index, [tmp_path / "runs"]) as process:
        eventually(lambda: process.progress.first_done)
        killed = process.pid
        os.kill(killed, signal.SIGKILL)
        write_suite(tmp_path / "runs", "late", [{"id": "a"}])
        eventually(lambda: ids(index) == ["late"])
        assert process.pid != killed


def test_index_process_exits_during_large_session(tmp_path: Path) -> None:
    """Regression: after the server was killed, the process read a large session to its end."""
    write_suite(tmp_path / "runs", "large", [{"id": f"case{number}"} for number in range(60_000)])
    command = make_module_command(
        "hil.controller.web.index.index_process", str(tmp_path / "index"), str(tmp_path / "runs")
    )
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        process.stdout.readline()
        process.stdin.close()
        assert process.wait(allowed_s(2.0)) == 0


def test_index_process_reports_unusable_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file"), IndexProcess(tmp_path / "file" / "index.sqlite", [tmp_path]):
        pass

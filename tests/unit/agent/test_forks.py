"""The fork server as the agent uses it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hil.agent import forks, ipc
from hil.agent.forks import ForkServer
from hil.core.processes import ExitStatus
from hil.errors import BoardError, BoardUnfit


class Runtime:
    """A runtime that does not compute."""

    @staticmethod
    def describe() -> dict[str, object]:
        return {"name": "none"}


class Slow(Runtime):
    """A runtime whose library is slow to import."""

    @staticmethod
    def preload() -> None:
        time.sleep(1)


class Deadly(Runtime):
    """A runtime whose library kills the process that imports it."""

    @staticmethod
    def preload() -> None:
        os.kill(os.getpid(), signal.SIGILL)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    # The fork server's process imports this module.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    made = ForkServer("test_forks:Runtime")
    assert made.start() == {"name": "none"}
    yield made
    made.stop()


def fork(server: ForkServer) -> tuple[int, ipc.Channel, threading.Event]:
    """Return a worker's pid, our end of its channel, and an event set when it exits."""
    ours, theirs = socket.socketpair()
    exited = threading.Event()
    with theirs, Path(os.devnull).open("r+b") as null:
        fds = [theirs.fileno(), null.fileno(), null.fileno(), null.fileno()]
        try:
            pid = server.fork(fds, lambda _: exited.set())
        except BaseException:
            ours.close()
            raise
    return pid, ipc.Channel(ours), exited


def test_fork_server_matches_concurrent_requests_to_workers(server: ForkServer):
    with ThreadPoolExecutor(8) as pool:
        workers = list(pool.map(lambda _: fork(server), range(24)))

    assert len({pid for pid, _, _ in workers}) == 24
    for _, channel, exited in workers:
        channel.close()
        assert exited.wait(30), "the worker whose channel was closed is another one"


@pytest.mark.ci
def test_fork_server_discards_late_reply(server: ForkServer, monkeypatch: pytest.MonkeyPatch):
    stopped = server._process
    assert isinstance(stopped, subprocess.Popen)
    monkeypatch.setattr(forks, "_PRELOAD_SECONDS", 0.5)
    os.kill(stopped.pid, signal.SIGSTOP)

    with pytest.raises(BoardError, match="does not respond"):
        fork(server)

    assert stopped.wait(30) == -signal.SIGKILL
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    _, channel, exited = fork(server)
    channel.close()
    assert exited.wait(30)


@pytest.mark.ci
def test_fork_server_reports_worker_exit_before_registration(server: ForkServer):
    # As if both messages had arrived before the requesting thread could continue.
    server._news.pids.append(7)
    server._news.ended[7] = ExitStatus(3, 5)
    ended: list[ExitStatus] = []
    with Path(os.devnull).open("r+b") as null:
        assert server.fork([null.fileno()] * 4, ended.append) == 7
    assert ended == [(3, 5)]


def test_fork_server_reports_process_start_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")

    assert "No such file" in ForkServer("test_forks:Runtime").start()["error"]


@pytest.mark.ci
def test_fork_server_rest_ends_workers_and_restarts_on_demand(server):
    pid, channel, _ = fork(server)
    server.pause()
    with pytest.raises(ipc.Closed):
        channel.receive(timeout=60)
    channel.close()
    assert server.describe() == {"name": "none"}
    assert server._process is None, "what it said is known, so nothing has to be started to say it again"
    again, channel, exited = fork(server)
    assert again != pid
    os.kill(again, signal.SIGKILL)
    assert exited.wait(60)
    channel.close()


def test_fork_server_describes_light_runtime_without_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    light = ForkServer("test_forks:Runtime", light=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", None)
        assert light.describe() == {"name": "none"}
    _, channel, exited = fork(light)
    channel.close()
    assert exited.wait(30)
    light.stop()


def test_fork_server_reports_import_error_of_light_runtime():
    assert "no_such_module" in ForkServer("no_such_module:Runtime", light=True).describe()["error"]


@pytest.mark.ci
def test_fork_server_first_worker_waits_for_library_import(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr(forks, "_FORK_SECONDS", 0.01)
    slow = ForkServer("test_forks:Slow", light=True)
    _, channel, exited = fork(slow)
    channel.close()
    assert exited.wait(30)
    slow.stop()


def test_fork_server_reports_board_unfit_if_import_kills_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    deadly = ForkServer("test_forks:Deadly", light=True)
    with pytest.raises(BoardUnfit, match="died while importing the library"):
        fork(deadly)
    deadly.stop()


def use_one_forked_ahead() -> None:
    """Fork servers ahead of use in a process with one thread, then use one and stop both."""
    server = ForkServer("test_forks:Runtime")
    ours, peer = socket.socketpair()
    server.fork_ahead()
    try:
        forked = server._ahead[1].pid
        assert server.describe() == {"name": "none"}
        ours.close()
        peer.settimeout(60)
        assert peer.recv(1) == b"", "it has nothing that its parent had open"
        pid, channel, exited = fork(server)
        assert os.getsid(forked) == forked, "it is of a session of its own"
        channel.close()
        assert exited.wait(60)
        pid, channel, exited = fork(server)
        os.kill(forked, signal.SIGKILL)
        assert exited.wait(60), "its workers end with it"
        channel.close()
        _, channel, exited = fork(server)
        assert isinstance(server._process, subprocess.Popen), "it was started anew, by itself"
        channel.close()
        assert exited.wait(60)
    finally:
        server.stop()
    never_used = ForkServer("test_forks:Runtime")
    never_used.fork_ahead()
    pid = never_used._ahead[1].pid
    never_used.stop()
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return
    raise AssertionError("one that was never needed is ended too")


@pytest.mark.ci
def test_fork_server_forked_ahead_serves_workers():
    code = "import test_forks; test_forks.use_one_forked_ahead()"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr

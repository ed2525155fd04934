"""An sshd of this machine's own, and shells on it."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.ssh_cases.agents import accepts_connections
from support.sshd import Sshd, running_sshd
from support.waiting import eventually

from hil.controller.devices.ssh.connect import open_shell
from hil.controller.devices.ssh.openssh import client as openssh
from hil.controller.devices.ssh.shell import Shell


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home with nothing in it, no ssh agent and no password."""
    folder = tmp_path / "home"
    (folder / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(folder))
    for variable in ("SSH_AUTH_SOCK", "HIL_SSH_PASSWORD"):
        monkeypatch.delenv(variable, raising=False)
    return folder


@pytest.fixture(autouse=True)
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What makes connections: the user's ssh or, where a test asks for it, paramiko, as on a machine without ssh."""
    name = str(getattr(request, "param", "OpenSSH"))
    monkeypatch.setattr(openssh, "is_usable", lambda: name == "OpenSSH")
    return name


@pytest.fixture
def log_in(client: str, sshd: Sshd, tmp_path: Path) -> Iterator[Callable[..., Shell]]:
    """Logs in, to the sshd of all tests or another address; what is not given is as it should be."""
    shells = []

    def call(address: str = "", server: Sshd = sshd, timeout: float = 10.0, **settings: object) -> Shell:
        connection = replace(server.connection, **settings)
        shell = open_shell(address or server.address, connection, board="b", base=tmp_path, timeout=timeout)
        shells.append(shell)
        return shell

    yield call
    for shell in shells:
        shell.close()


@pytest.fixture
def shell(log_in: Callable[..., Shell]) -> Shell:
    return log_in()


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """An ssh agent; adds keys to it."""
    place = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", place], stdout=subprocess.DEVNULL)
    eventually(lambda: accepts_connections(place), process=process)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(place))
    yield lambda key: subprocess.run(["ssh-add", "-q", key], check=True)
    process.terminate()
    process.wait()


@pytest.fixture
def in_terminal(client: str, tmp_path: Path) -> Callable[..., tuple[bytes, int]]:
    """Runs a Python program in a terminal, types an answer once it is asked for; what it showed, and its code."""

    def run(source: str, *argv: str, prompt: bytes, answer: bytes, again: bool = False) -> tuple[bytes, int]:
        program = tmp_path / "program.py"
        program.write_text(source)
        child, terminal = pty.fork()
        if child == 0:
            environment = {**os.environ, "PATH": os.environ["PATH"] if client == "OpenSSH" else "/nowhere"}
            os.execve(sys.executable, [sys.executable, str(program), *argv], environment)
        said, typed, until = b"", False, time.monotonic() + 60
        try:
            with contextlib.suppress(OSError):  # so says a terminal whose last process has gone
                while time.monotonic() < until:
                    # A program that takes the terminal over drops what was typed before: then it is typed again.
                    if not select.select([terminal], [], [], 2)[0]:
                        typed = typed and not again
                    elif not (piece := os.read(terminal, 1024)):
                        break
                    else:
                        said += piece
                    if prompt in said and not typed:
                        os.write(terminal, answer + b"\n")
                        typed = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGHUP)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os.close(terminal)
        return said, code

    return run

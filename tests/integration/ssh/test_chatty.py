"""A login that prints text before every command, like a .bashrc: command output excludes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.sshd import BOTH, Sshd, running_sshd

from hil.controller.devices.deploy.probe import ask
from hil.controller.devices.ssh.shell import Shell

LogIn = Callable[..., Shell]
pytestmark = pytest.mark.parametrize(*BOTH, indirect=True)


@pytest.fixture(params=["echo 'Welcome!'", "printf 'no end of line'", "printf 'folder\\t/elsewhere\\n'"])
def chatty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sshd]:
    # sshd runs this before every command, as bash does with a .bashrc.
    with running_sshd(tmp_path / "chatty") as server:
        (server.home / ".ssh").mkdir()
        (server.home / ".ssh/rc").write_text(request.param + "\n")
        yield server


def test_command_output_excludes_login_output(chatty: Sshd, log_in: LogIn) -> None:
    shell = log_in(server=chatty)
    assert shell.run(["echo", "said"]).out == b"said\n"
    assert shell.run(["cat"], stdin=bytes(range(256)) * 1000).out == bytes(range(256)) * 1000
    assert shell.run(["sh", "-c", "exit 3"], check=False).code == 3
    assert shell.run(["true"]).out == b""


def test_file_transfer_survives_login_output(chatty: Sshd, log_in: LogIn, tmp_path: Path) -> None:
    shell = log_in(server=chatty)
    (tmp_path / "near").write_bytes(bytes(range(256)) * 1000)
    shell.put(tmp_path / "near", f"{tmp_path}/far")
    shell.get(f"{tmp_path}/far", tmp_path / "back", 256_000)
    assert (tmp_path / "back").read_bytes() == (tmp_path / "near").read_bytes()


def test_probe_survives_login_output(chatty: Sshd, log_in: LogIn, tmp_path: Path) -> None:
    assert ask(log_in(server=chatty), "probe", str(tmp_path / "place"), "", board="b").folder == str(tmp_path / "place")

"""Non-POSIX login shells, and the commands that hil runs through them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable

import pytest
from support.debian import program
from support.ssh_cases.user import User, host
from support.sshd import Sshd

# The login shell and its Debian package.
SHELLS = {"dash": "dash", "rbash": "bash", "tcsh": "tcsh", "zsh": "zsh", "fish": "fish"}
ODD = "a!b\\c $HOME `id` \"d\" 'e' *"
IN_PYTEST = """
import hil

def test_connects():
    with hil.connect("ssh:board", hw_type="command") as board:
        assert board.shell
"""


def login_shell(name: str) -> str:
    """Return a shell's path, or skip if it is not installed and too large to fetch."""
    if name == "fish":
        return shutil.which("fish") or pytest.skip("fish is not installed")
    path, environment = program(name, SHELLS[name], f"bin/{name}")
    assert not environment or name in ("tcsh", "zsh")
    return str(path)


@pytest.fixture(params=SHELLS)
def shelled(request: pytest.FixtureRequest, user: User, start_sshd: Callable[..., Sshd]) -> User:
    """A user with a different login shell on the board."""
    server = start_sshd(shell=login_shell(request.param))
    user.take_key(server.identity)
    user.pin(server)
    user.configure(host("board", server))
    return user


def test_login_shell_runs_commands(shelled: User) -> None:
    shelled.both().assert_logged_in()
    ping = shelled.ping()
    assert ping.code == 0, str(ping)


def test_shell_command_passes_arguments_unchanged(shelled: User) -> None:
    """Plain ssh leaves quoting to the user."""
    ended = shelled.run("hil", "board", "shell", "ssh:board", "--", "printf", "%s", ODD)
    assert ended.out == ODD, str(ended)


def test_login_greeting_stays_out_of_command_output(keyed: User, sshd: Sshd) -> None:
    profile = sshd.home / ".profile"
    profile.write_text("echo welcome to the lab; printf 'no end of line'\n")
    try:
        keyed.both().assert_logged_in()
        ping = keyed.ping()
        assert ping.code == 0, str(ping)
    finally:
        profile.unlink()


def test_connection_works_under_pytest(keyed: User, sshd: Sshd) -> None:
    """pytest replaces sys.stdin with an object that raises on read."""
    keyed.configure("Match exec true", "  Compression no", host("board", sshd))
    (keyed.folder / "test_board.py").write_text(IN_PYTEST)
    ended = keyed.run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_board.py")
    assert "1 passed" in ended.out, str(ended)


@pytest.mark.slow
def test_board_check_leaves_root_directory_unchanged(user: User, start_sshd: Callable[..., Sshd]) -> None:
    """A script passed to tcsh as an argument runs with an empty $1, which created /programs and /runs."""
    server = start_sshd(shell=login_shell("tcsh"))
    user.take_key(server.identity)
    user.pin(server)
    user.configure(host("board", server))
    before = set(os.listdir("/"))  # noqa: PTH208
    ended = user.run("hil", "board", "check", "ssh:board", "--runtime-hw-type", "command")
    assert set(os.listdir("/")) == before  # noqa: PTH208
    assert ended.code == 0, str(ended)

"""Logins of real boards: key with passphrase, hardened sshd, readable key, .bashrc with output."""

from __future__ import annotations

import subprocess

import pytest
from support.boards import MakeBoard
from support.models import DIGITS
from support.slow import slow_except
from support.terminals import terminal

from hil.errors import EXIT_BOARD
from tools.virtual_board import VirtualBoard

pytestmark = pytest.mark.board

DIGITS_CNN = DIGITS / "digits_cnn.onnx"
CHATTY = "echo 'Welcome to the lab!'; printf 'and no end of line'"


@pytest.fixture(scope="module")
def board(start_board: MakeBoard) -> VirtualBoard:
    """Provide a separate board; each test configures its sshd."""
    return start_board(name="login", arch="x86_64")


def to(board: VirtualBoard, identity: object = "") -> list[object]:
    return ["--board", board.address, "--identity", identity or board.identity, "--known-hosts", board.known_hosts]


@pytest.fixture
def configure(board: VirtualBoard):
    """Return a function that adds sshd settings until the end of the test."""
    # sshd writes its PID when it listens with the new settings.
    again = "read pid </run/sshd.pid; rm /run/sshd.pid; kill -HUP $pid; until [ -s /run/sshd.pid ]; do sleep 0.1; done"
    script = 'cp -n $0 $0.was; { printf "%s\\n" "$@"; cat $0.was; } >$0; ' + again

    def call(*settings: str) -> None:
        board.run(["sh", "-ec", script, "/etc/ssh/sshd_config", *settings], check=True)

    yield call
    call()


@pytest.mark.parametrize(
    ("settings", "way"),
    slow_except(
        [
            (["AllowStreamLocalForwarding no"], "using TCP on the board's loopback interface, with a token"),
            (["AllowStreamLocalForwarding no", "AllowTcpForwarding no"], "using stdin and stdout of a command"),
        ],
        1,
    ),
    ids=["no sockets", "no TCP either"],
)
def test_run_passes_with_hardened_sshd(hil, board, configure, settings, way):
    configure(*settings)
    ended = hil("run", DIGITS_CNN, *to(board), "--json")
    assert (ended.code, ended.case["outcome"]) == (0, "PASS"), ended.err
    assert "the board's sshd does not forward Unix sockets" in ended.err and way in ended.err


def test_run_rejects_world_readable_private_key(hil, board, tmp_path):
    (tmp_path / "open").write_bytes(board.identity.read_bytes())
    (tmp_path / "open").chmod(0o644)
    ended = hil("run", DIGITS_CNN, *to(board, tmp_path / "open"), "--json")
    assert (ended.code, ended.case["outcome"]) == (EXIT_BOARD, "BOARD_REFUSED"), ended.err
    assert f"Permissions 0644 for '{tmp_path}/open' are too open" in ended.out
    assert f"chmod 600 {tmp_path}/open" in ended.out


def test_run_ignores_bashrc_output(hil, board):
    home = ["sh", "-ec", 'printf "%s\\n" "$1" >/root/.bashrc', "sh"]
    board.run([*home, CHATTY], check=True)
    try:
        ended = hil("run", DIGITS_CNN, *to(board), "--json")
        assert (ended.code, ended.case["outcome"]) == (0, "PASS"), ended.err
        assert "Welcome" not in ended.out + ended.err
    finally:
        board.run([*home, ""], check=True)


def test_run_prompts_for_key_passphrase(board, environment, tmp_path):
    key = tmp_path / "locked"
    key.write_bytes(board.identity.read_bytes())
    key.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "sesame", "-f", key], check=True)
    command = ["-m", "hil.controller.cli.main", "run", DIGITS_CNN, *to(board, key)]
    with terminal(*command, cwd=tmp_path, env=environment) as asked:
        asked.receive_answer(f"Enter passphrase for key '{key}': ".encode(), b"sesame")
        assert asked.ended(240) == 0
    assert b"PASS" in asked.shown and b"sesame" not in asked.shown and asked.shown.count(b"Enter passphrase") == 1

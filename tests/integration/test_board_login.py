"""`hil run` on boards as people have them: a key with a passphrase, a hardened sshd, an open key, a talking .bashrc."""

from __future__ import annotations

import subprocess

import pytest
from support.boards import MakeBoard
from support.models import DIGITS
from support.terminals import terminal

from tools.virtual_board import VirtualBoard

pytestmark = pytest.mark.board

DIGITS_CNN = DIGITS / "digits_cnn.onnx"
CHATTY = "echo 'Welcome to the lab!'; printf 'and no end of line'"


@pytest.fixture(scope="module")
def board(start_board: MakeBoard) -> VirtualBoard:
    """A board of this file's own: its sshd is set up anew by each test."""
    return start_board(name="login", arch="x86_64")


def to(board: VirtualBoard, identity: object = "") -> list[object]:
    return ["--board", board.address, "--identity", identity or board.identity, "--known-hosts", board.known_hosts]


@pytest.fixture
def configure(board: VirtualBoard):
    """Has the board's sshd take further settings, until the test is over."""
    # It writes the number of its process once it listens with the new settings.
    again = "read pid </run/sshd.pid; rm /run/sshd.pid; kill -HUP $pid; until [ -s /run/sshd.pid ]; do sleep 0.1; done"
    script = 'cp -n $0 $0.was; { printf "%s\\n" "$@"; cat $0.was; } >$0; ' + again

    def call(*settings: str) -> None:
        board.run(["sh", "-ec", script, "/etc/ssh/sshd_config", *settings], check=True)

    yield call
    call()


@pytest.mark.parametrize(
    ("settings", "way"),
    [
        (["AllowStreamLocalForwarding no"], "going through TCP on the board's own loopback, with a token"),
        (["AllowStreamLocalForwarding no", "AllowTcpForwarding no"], "going through the input and output of a command"),
    ],
    ids=["no sockets", "no TCP either"],
)
def test_a_hardened_sshd(hil, board, configure, settings, way):
    configure(*settings)
    ended = hil("run", DIGITS_CNN, *to(board), "--json")
    assert (ended.code, ended.case["outcome"]) == (0, "PASS"), ended.err
    assert "the board's sshd forwards no Unix sockets" in ended.err and way in ended.err


def test_a_key_that_others_can_read_gets_sshs_words(hil, board, tmp_path):
    (tmp_path / "open").write_bytes(board.identity.read_bytes())
    (tmp_path / "open").chmod(0o644)
    ended = hil("run", DIGITS_CNN, *to(board, tmp_path / "open"), "--json")
    assert (ended.code, ended.case["outcome"]) == (0, "PASS"), ended.err
    assert "UNPROTECTED PRIVATE KEY FILE: permissions 0644" in ended.err and "too open" in ended.err
    assert f"chmod 600 {tmp_path}/open" in ended.err and "AllowStreamLocalForwarding" not in ended.err


def test_a_bashrc_that_prints(hil, board):
    home = ["sh", "-ec", 'printf "%s\\n" "$1" >/root/.bashrc', "sh"]
    board.run([*home, CHATTY], check=True)
    try:
        ended = hil("run", DIGITS_CNN, *to(board), "--json")
        assert (ended.code, ended.case["outcome"]) == (0, "PASS"), ended.err
        assert "Welcome" not in ended.out + ended.err
    finally:
        board.run([*home, ""], check=True)


def test_a_key_with_a_passphrase(board, environment, tmp_path):
    key = tmp_path / "locked"
    key.write_bytes(board.identity.read_bytes())
    key.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "sesame", "-f", key], check=True)
    command = ["-m", "hil.controller.cli.main", "run", DIGITS_CNN, *to(board, key)]
    with terminal(*command, cwd=tmp_path, env=environment) as asked:
        asked.answer(f"passphrase of {key}: ".encode(), b"sesame")
        assert asked.ended(240) == 0
    assert b"PASS" in asked.shown and b"sesame" not in asked.shown and asked.shown.count(b"passphrase of") == 1

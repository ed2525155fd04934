"""The test helpers that inspect boards find listeners and readable files."""

from __future__ import annotations

import subprocess

import pytest
from support.boards import MakeBoard
from support.boards_checks import listening, world_readable

from tools.virtual_board import VirtualBoard

pytestmark = pytest.mark.board

PLACES = ["/home", "/tmp", "/dev/shm", "/run", "/root"]
SSHD = {("tcp", "0.0.0.0", 22), ("tcp", "::", 22)}
LISTENERS = """
import socket, sys
kept = []
for family, kind, address in (
    (socket.AF_INET, socket.SOCK_STREAM, "127.0.0.1"),
    (socket.AF_INET6, socket.SOCK_STREAM, "::1"),
    (socket.AF_INET, socket.SOCK_DGRAM, "0.0.0.0"),
):
    one = socket.socket(family, kind)
    one.bind((address, 0))
    if kind == socket.SOCK_STREAM:
        one.listen()
    print(one.getsockname()[1], flush=True)
    kept.append(one)
sys.stdin.read()
"""


@pytest.fixture
def board(make_board: MakeBoard) -> VirtualBoard:
    return make_board()


def test_checks_find_only_sshd_on_fresh_board(board: VirtualBoard, board_aarch64: VirtualBoard) -> None:
    assert listening(board) == listening(board_aarch64) == SSHD
    assert world_readable(board, PLACES) == []
    assert world_readable(board, PLACES, reachable=False) == []


def test_listening_reports_sockets_on_all_board_addresses(board: VirtualBoard) -> None:
    command = [*board.ssh(), f"python3 -u -c '{LISTENERS}'"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as listener:
        one, two, three = (int(listener.stdout.readline()) for _ in range(3))
        assert listening(board) - SSHD == {("tcp", "127.0.0.1", one), ("tcp", "::1", two), ("udp", "0.0.0.0", three)}
        listener.stdin.close()


def test_world_readable_finds_exposed_files(board: VirtualBoard) -> None:
    script = """
        umask 077
        mkdir -p /tmp/open/closed /root/closed
        cd /tmp/open
        touch 'a b' own closed/inner /root/closed/inner
        chmod 755 . && chmod 644 'a b' closed/inner /root/closed/inner
        ln -s own link
    """
    board.run(["sh", "-ec", script], check=True)
    assert world_readable(board, PLACES) == ["/tmp/open", "/tmp/open/a b"]
    assert world_readable(board, PLACES, reachable=False) == [
        "/root/closed/inner", "/tmp/open", "/tmp/open/a b", "/tmp/open/closed/inner",
    ]  # fmt: skip
    assert world_readable(board, ["/root/closed"]) == []
    with pytest.raises(AssertionError, match="not on the board"):
        world_readable(board, ["/root/.hill"])

"""Servers that forward less than usual: the agent is reached all the same, and the way is told."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.agents import Program
from support.sshd import LOOPBACK, Sshd, running_sshd, started_with
from support.waiting import eventually

from hil.controller.devices.board_client import Target
from hil.controller.devices.client import AgentClient
from hil.controller.devices.ssh.shell import Shell
from hil.controller.devices.ssh.tunnel import NoTunnel, TcpRelay, Tunnel, open_any_tunnel
from hil.core.digest import digest_file
from hil.errors import BoardLost

LogIn = Callable[..., Shell]
PYTHON = "/usr/bin/python3"
NO_SOCKETS = "AllowStreamLocalForwarding no"
NO_TCP = "AllowTcpForwarding no"
# What ssh itself is configured with, and the word for the way that is left.
HARDENED = {
    "no sockets": ([NO_SOCKETS], "going through TCP on the board's own loopback, with a token"),
    "neither": ([NO_SOCKETS, NO_TCP], "going through the input and output of a command there"),
    "nothing at all": (["DisableForwarding yes"], "going through the input and output of a command there"),
}


@pytest.fixture(params=HARDENED.values(), ids=HARDENED)
def hardened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Sshd, str]]:
    settings, way = request.param
    with running_sshd(tmp_path / "hardened", *settings) as server:
        yield server, way


@pytest.fixture
def tunnel_to() -> Iterator[Callable[..., Tunnel]]:
    opened: list[Tunnel] = []

    def call(shell: Shell, remote: str, say: Callable[[str], None] = print, python: str = PYTHON) -> Tunnel:
        opened.append(open_any_tunnel(shell, remote.removeprefix("unix:"), python, say))
        return opened[-1]

    yield call
    for tunnel in opened:
        tunnel.close()


def test_an_agent_is_reached_and_the_way_is_told(
    hardened: tuple[Sshd, str],
    log_in: LogIn,
    tunnel_to: Callable[..., Tunnel],
    start_agent: Callable[..., str],
    tmp_path: Path,
) -> None:
    server, way = hardened
    told: list[str] = []
    tunnel = tunnel_to(log_in(server=server), start_agent(), told.append)
    (line,) = told
    assert line.startswith("the board's sshd forwards no Unix sockets (it says: ") and line.endswith(way)
    client = AgentClient(Target(tunnel.address), "b")
    try:
        assert client.describe().protocol
        (tmp_path / "blob").write_bytes(os.urandom(5_000_000))
        blob = Program("", tmp_path / "blob", {"blob": digest_file(tmp_path / "blob")})
        client.open_session("test", on_wait=print)
        client.put({name: (tmp_path / "blob", 0) for name in blob.digests.values()})
        assert bytes(client.get(blob.digests["blob"])) == (tmp_path / "blob").read_bytes()
        assert tunnel.alive()
    finally:
        client.close()


def test_a_server_that_forwards_sockets_is_used_as_ever(
    shell: Shell, tunnel_to: Callable[..., Tunnel], start_agent: Callable[..., str]
) -> None:
    told: list[str] = []
    tunnel_to(shell, start_agent(), told.append)
    assert told == []


def test_the_port_is_for_who_has_the_token_alone_and_no_process_shows_it(
    log_in: LogIn, start_agent: Callable[..., str], tmp_path: Path
) -> None:
    remote = start_agent().removeprefix("unix:")
    with running_sshd(tmp_path / "hardened", NO_SOCKETS) as server:
        shell = log_in(server=server)
        relay = TcpRelay(shell.transport, PYTHON, remote)
        helpers = [pid for pid in started_with(f"HOME={server.home}") if b"board_relay" in command_line(pid)]
        assert helpers
        # sshd's own processes cannot be seen by everybody; what was started, with all its words, can.
        shown = [command_line(pid) + Path(f"/proc/{pid}/environ").read_bytes() for pid in helpers]
        assert not any(relay._token.encode() in words for words in shown)
        places = {line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if " 0A " in line}
        assert f"0100007F:{relay._port:04X}" in places and f"00000000:{relay._port:04X}" not in places
        for token in (b"", b"x" * 64, relay._token.encode()[:-1] + b"!"):
            with socket.create_connection((LOOPBACK, relay._port)) as stranger:
                stranger.settimeout(60)
                stranger.sendall(token + (b"" if len(token) == 64 else b"PRI * HTTP/2.0\r\n" + b"x" * 64))
                assert answer(stranger) == b""
        channel, pieces = relay.open()
        channel.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        assert next(pieces)  # an HTTP/2 server's first words
        channel.close()
        relay.close()
        eventually(lambda: not any(command_line(pid) for pid in helpers))


def test_no_helper_outlives_a_link_that_broke(log_in: LogIn, start_agent: Callable[..., str], tmp_path: Path) -> None:
    remote = start_agent().removeprefix("unix:")
    with running_sshd(tmp_path / "hardened", NO_SOCKETS) as server:
        tunnel = open_any_tunnel(log_in(server=server), remote, PYTHON, print)
        helpers = [pid for pid in started_with(f"HOME={server.home}") if b"board_relay" in command_line(pid)]
        server.stop()
        eventually(lambda: not tunnel.alive())
        eventually(lambda: not any(command_line(pid) for pid in helpers))
        tunnel.close()


def test_an_agent_that_left_meanwhile_is_no_fault_of_the_server(log_in: LogIn, tmp_path: Path) -> None:
    with running_sshd(tmp_path / "hardened", NO_SOCKETS) as server, pytest.raises(BoardLost, match="left just now"):
        open_any_tunnel(log_in(server=server), str(tmp_path / "none.sock"), PYTHON, print)


def test_a_connection_that_no_helper_carries_is_told_in_the_log(
    log_in: LogIn, start_agent: Callable[..., str], tmp_path: Path
) -> None:
    remote = start_agent().removeprefix("unix:")
    with running_sshd(tmp_path / "hardened", NO_SOCKETS, NO_TCP) as server:
        tunnel = open_any_tunnel(log_in(server=server), remote, PYTHON, print)
        try:
            Path(remote).rename(tmp_path / "gone.sock")
            for _ in range(2):  # the first is carried by the helper that found out that there is a way
                with socket.socket(socket.AF_UNIX) as near:
                    near.connect(tunnel.address.removeprefix("unix:"))
                    near.shutdown(socket.SHUT_WR)
                    near.settimeout(60)
                    while near.recv(1 << 16):
                        pass
            eventually(lambda: "the agent's socket: No such file" in tunnel.log())
        finally:
            tunnel.close()


def test_a_helper_that_cannot_run_leaves_no_way(log_in: LogIn, tmp_path: Path) -> None:
    with running_sshd(tmp_path / "hardened", NO_SOCKETS) as server, pytest.raises(NoTunnel, match="not found"):
        open_any_tunnel(log_in(server=server), str(tmp_path / "none.sock"), "/no/such/python", print)


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def answer(sock: socket.socket) -> bytes:
    try:
        return sock.recv(100)
    except ConnectionError:
        return b""

"""Servers with restricted forwarding: hil reaches the agent through a relay and reports it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.agents import Program
from support.sshd import BOTH, LOOPBACK, Sshd, running_sshd, started_with
from support.waiting import eventually

from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.devices.ssh.shell import Shell
from hil.controller.devices.ssh.tunnel import NoTunnel, SshTunnel, TcpRelay, open_any_tunnel
from hil.core.files import digest_file
from hil.errors import BoardLost

LogIn = Callable[..., Shell]
pytestmark = pytest.mark.parametrize(*BOTH, indirect=True)
PYTHON = "/usr/bin/python3"
NO_SOCKETS = "AllowStreamLocalForwarding no"
NO_TCP = "AllowTcpForwarding no"
# The sshd settings, and the reported relay.
HARDENED = {
    "no sockets": ([NO_SOCKETS], "using TCP on the board's loopback interface, with a token"),
    "neither": ([NO_SOCKETS, NO_TCP], "using stdin and stdout of a command on the board"),
    "nothing at all": (["DisableForwarding yes"], "using stdin and stdout of a command on the board"),
}


@pytest.fixture(params=HARDENED.values(), ids=HARDENED)
def hardened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Sshd, str]]:
    settings, way = request.param
    with running_sshd(tmp_path / "hardened", *settings) as server:
        yield server, way


@pytest.fixture
def tunnel_to() -> Iterator[Callable[..., SshTunnel]]:
    opened: list[SshTunnel] = []

    def call(shell: Shell, remote: str, say: Callable[[str], None] = print, python: str = PYTHON) -> SshTunnel:
        opened.append(open_any_tunnel(shell, remote.removeprefix("unix:"), python, say))
        return opened[-1]

    yield call
    for tunnel in opened:
        tunnel.close()


def test_hardened_server_falls_back_to_reported_relay(
    hardened: tuple[Sshd, str],
    log_in: LogIn,
    tunnel_to: Callable[..., SshTunnel],
    start_agent: Callable[..., str],
    tmp_path: Path,
) -> None:
    server, way = hardened
    told: list[str] = []
    tunnel = tunnel_to(log_in(server=server), start_agent(), told.append)
    (line,) = told
    assert line.startswith("the board's sshd does not forward Unix sockets (") and line.endswith(way)
    client = AgentClient(AgentEndpoint(tunnel.address), "b")
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


def test_server_with_socket_forwarding_skips_fallback(
    shell: Shell, tunnel_to: Callable[..., SshTunnel], start_agent: Callable[..., str]
) -> None:
    told: list[str] = []
    tunnel_to(shell, start_agent(), told.append)
    assert told == []


def test_relay_port_requires_hidden_token(log_in: LogIn, start_agent: Callable[..., str], tmp_path: Path) -> None:
    remote = start_agent().removeprefix("unix:")
    with running_sshd(tmp_path / "hardened", NO_SOCKETS) as server:
        shell = log_in(server=server)
        relay = TcpRelay(shell.transport, PYTHON, remote)
        relay.listen(tmp_path / "near.sock")
        helpers = [pid for pid in started_with(f"HOME={server.home}") if b"board_relay" in command_line(pid)]
        assert helpers
        # Not every user can see sshd's processes, but the started helpers and their arguments are visible.
        shown = [command_line(pid) + Path(f"/proc/{pid}/environ").read_bytes() for pid in helpers]
        assert not any(relay._token.encode() in words for words in shown)
        places = {line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if " 0A " in line}
        assert f"0100007F:{relay.port:04X}" in places and f"00000000:{relay.port:04X}" not in places
        for token in (b"", b"x" * 64, relay._token.encode()[:-1] + b"!"):
            with socket.create_connection((LOOPBACK, relay.port)) as stranger:
                stranger.settimeout(60)
                stranger.sendall(token + (b"" if len(token) == 64 else b"PRI * HTTP/2.0\r\n" + b"x" * 64))
                assert answer(stranger) == b""
        with socket.socket(socket.AF_UNIX) as near:
            near.connect(str(tmp_path / "near.sock"))
            near.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            assert near.recv(1)  # the first bytes of an HTTP/2 server
        relay.close()
        eventually(lambda: not any(command_line(pid) for pid in helpers))


def test_relay_stops_when_link_breaks(log_in: LogIn, start_agent: Callable[..., str], tmp_path: Path) -> None:
    remote = start_agent().removeprefix("unix:")
    with running_sshd(tmp_path / "hardened", NO_SOCKETS) as server:
        tunnel = open_any_tunnel(log_in(server=server), remote, PYTHON, print)
        helpers = [pid for pid in started_with(f"HOME={server.home}") if b"board_relay" in command_line(pid)]
        server.stop()
        eventually(lambda: not tunnel.alive())
        eventually(lambda: not any(command_line(pid) for pid in helpers))
        tunnel.close()


def test_agent_exit_raises_board_lost(log_in: LogIn, tmp_path: Path) -> None:
    with running_sshd(tmp_path / "hardened", NO_SOCKETS) as server, pytest.raises(BoardLost, match="the agent exited"):
        open_any_tunnel(log_in(server=server), str(tmp_path / "none.sock"), PYTHON, print)


def test_tunnel_log_reports_failed_connection(log_in: LogIn, start_agent: Callable[..., str], tmp_path: Path) -> None:
    remote = start_agent().removeprefix("unix:")
    with running_sshd(tmp_path / "hardened", NO_SOCKETS, NO_TCP) as server:
        tunnel = open_any_tunnel(log_in(server=server), remote, PYTHON, print)
        try:
            Path(remote).rename(tmp_path / "gone.sock")
            for _ in range(2):  # the helper that tested the relay carries the first connection
                with socket.socket(socket.AF_UNIX) as near:
                    near.connect(tunnel.address.removeprefix("unix:"))
                    near.shutdown(socket.SHUT_WR)
                    near.settimeout(60)
                    while near.recv(1 << 16):
                        pass
            eventually(lambda: "the agent's socket: No such file" in tunnel.log())
        finally:
            tunnel.close()


def test_unusable_python_fails_tunnel(log_in: LogIn, tmp_path: Path) -> None:
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

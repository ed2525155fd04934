"""Tunnels to a real agent through a real sshd."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.agents import Program
from support.sshd import BOTH, Sshd, descendants, running_sshd
from support.waiting import eventually

from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.ssh.shell import Shell
from hil.controller.devices.ssh.tunnel import SshTunnel, open_tunnel
from hil.core.files import digest_file

LogIn = Callable[..., Shell]


pytestmark = pytest.mark.parametrize(*BOTH, indirect=True)


@pytest.fixture
def open_one() -> Iterator[Callable[..., SshTunnel]]:
    """Open tunnels and close them after the test."""
    opened: list[SshTunnel] = []

    def call(shell: Shell, remote: object) -> SshTunnel:
        opened.append(open_tunnel(shell, str(remote)))
        return opened[-1]

    yield call
    for tunnel in opened:
        tunnel.close()


def local_path(tunnel: SshTunnel) -> Path:
    return Path(tunnel.address.removeprefix("unix:"))


def ask(tunnel: SshTunnel, data: bytes) -> bytes:
    """Send data through the tunnel and read the full reply."""
    with socket.socket(socket.AF_UNIX) as near:
        # ssh creates its socket shortly before it listens.
        eventually(lambda: near.connect_ex(str(local_path(tunnel))) == 0)
        # Without a remote listener, the connection may close before any data is sent.
        with contextlib.suppress(OSError):
            near.sendall(data)
            near.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: near.recv(1 << 16), b""))


def test_tunnel_carries_agent_calls(
    shell: Shell,
    open_one: Callable[..., SshTunnel],
    start_agent: Callable[..., str],
    open_client: Callable[[str], AgentClient],
    add_programs: dict[str, Program],
    tmp_path: Path,
) -> None:
    tunnel = open_one(shell, start_agent().removeprefix("unix:"))
    client = open_client(tunnel.address)
    (tmp_path / "blob").write_bytes(os.urandom(20_000_000))
    blob = Program("", tmp_path / "blob", {"blob": digest_file(tmp_path / "blob")})
    blob.push(client)
    assert bytes(client.get(blob.digests["blob"])) == (tmp_path / "blob").read_bytes()
    program = add_programs["iree"]
    program.push(client)
    ones = np.ones(4096, np.float32)
    loaded = program.load(client)
    ran = client.invoke(loaded.program_id, {spec.name: ones for spec in loaded.inputs})
    assert all(np.array_equal(value, ones + ones) for value in ran.outputs.values())


def test_tunnel_socket_permits_only_user_and_disappears(shell: Shell, open_one, tmp_path: Path) -> None:
    tunnel = open_one(shell, tmp_path / "far.sock")
    socket_path = local_path(tunnel)
    assert socket_path.is_socket() and len(str(socket_path)) < 100
    assert socket_path.parent.stat().st_mode & 0o777 == 0o700
    tunnel.close()
    tunnel.close()
    assert not tunnel.alive()
    assert not socket_path.parent.exists()


def test_tunnel_connects_to_socket_created_later(shell: Shell, open_one, tmp_path: Path) -> None:
    tunnel = open_one(shell, tmp_path / "far.sock")
    assert ask(tunnel, b"") == b""
    eventually(lambda: "fail" in tunnel.log())
    assert tunnel.alive()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "far.sock"))
        listener.listen()
        child = os.fork()
        if child == 0:
            far, _ = listener.accept()
            while data := far.recv(1 << 16):
                far.sendall(data.upper())
            os._exit(0)
        assert ask(tunnel, b"x" * 500_000) == b"X" * 500_000
        os.waitpid(child, 0)


def test_tunnel_ends_when_server_stops(log_in: LogIn, open_one, tmp_path: Path) -> None:
    with running_sshd(tmp_path / "other") as server:
        tunnel = open_one(log_in(server=server), tmp_path / "far.sock")
    eventually(lambda: not tunnel.alive())


def test_tunnel_ignores_forwards_and_master_of_config(log_in: LogIn, home: Path, tmp_path: Path) -> None:
    (home / ".ssh/config").write_text(
        f"Host *\n  ControlMaster auto\n  ControlPath {tmp_path}/master\n  LocalForward {tmp_path}/more.sock /x\n"
        "  RemoteCommand false\n  PermitLocalCommand yes\n  LocalCommand false\n  RequestTTY force\n"
    )
    tunnel = open_tunnel(log_in(), str(tmp_path / "far.sock"))
    assert tunnel.alive()
    assert not list(tmp_path.glob("master*")) and not (tmp_path / "more.sock").exists()
    tunnel.close()


HOLDER = """
import sys, time
from pathlib import Path
from hil.core.board_config import Connection
from hil.controller.devices.ssh.connect import open_shell
from hil.controller.devices.ssh.tunnel import open_tunnel
connection = Connection(identity=sys.argv[2], known_hosts=sys.argv[3])
shell = open_shell(sys.argv[1], connection, board="b", base=Path("/"))
tunnel = open_tunnel(shell, "/nothing.sock")
print("ready", flush=True)
time.sleep(1000)
"""


def test_killed_controller_stops_ssh_processes(client: str, sshd: Sshd, tmp_path: Path) -> None:
    if client != "OpenSSH":
        pytest.skip("it starts no process")
    (tmp_path / "holder.py").write_text(HOLDER)
    arguments = [str(tmp_path / "holder.py"), sshd.address, str(sshd.identity), str(sshd.known_hosts)]
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"ready\n"
        started = descendants(holder.pid)
        assert len(started) >= 2
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    eventually(lambda: not any(is_running(pid) for pid in started))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

"""Tunnels to a real agent behind a real sshd, by OpenSSH's client and through our own connection."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import paramiko
import pytest
from support.agents import Program
from support.sshd import IS_ROOT, LOOPBACK, PASSWORD, PASSWORD_USER, Sshd, descendants, make_key, running_sshd
from support.waiting import eventually

from hil.controller.devices.client import AgentClient
from hil.controller.devices.ssh.shell import Shell
from hil.controller.devices.ssh.tunnel import Tunnel, open_tunnel
from hil.core.digest import digest_file
from hil.errors import BoardUnreachable

LogIn = Callable[..., Shell]


@pytest.fixture(params=[True, False], ids=["OpenSSH", "paramiko"])
def open_one(request: pytest.FixtureRequest) -> Iterator[Callable[..., Tunnel]]:
    """Opens tunnels of one form, closed at the end."""
    opened: list[Tunnel] = []

    def call(shell: Shell, remote: object) -> Tunnel:
        opened.append(open_tunnel(shell, str(remote), openssh_client=request.param))
        return opened[-1]

    yield call
    for tunnel in opened:
        tunnel.close()


def local_path(tunnel: Tunnel) -> Path:
    return Path(tunnel.address.removeprefix("unix:"))


def ask(tunnel: Tunnel, data: bytes) -> bytes:
    """Send data to the far end, and read all that comes back."""
    with socket.socket(socket.AF_UNIX) as near:
        # ssh makes its socket a moment before it listens there.
        eventually(lambda: near.connect_ex(str(local_path(tunnel))) == 0)
        # Where nobody listens at the far end, this one may be closed before anything could be sent.
        with contextlib.suppress(OSError):
            near.sendall(data)
            near.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: near.recv(1 << 16), b""))


def test_an_agent_is_used_through_it(
    shell: Shell,
    open_one: Callable[..., Tunnel],
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


def test_only_this_user_sees_the_local_end_and_it_goes(shell: Shell, open_one, tmp_path: Path) -> None:
    tunnel = open_one(shell, tmp_path / "far.sock")
    socket_path = local_path(tunnel)
    assert socket_path.is_socket() and len(str(socket_path)) < 100
    assert socket_path.parent.stat().st_mode & 0o777 == 0o700
    tunnel.close()
    tunnel.close()
    assert not tunnel.alive()
    assert not socket_path.parent.exists()


def test_a_socket_that_comes_later(shell: Shell, open_one, tmp_path: Path) -> None:
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


def test_a_server_that_goes_ends_it(log_in: LogIn, open_one, tmp_path: Path) -> None:
    with running_sshd(tmp_path / "other") as server:
        tunnel = open_one(log_in(server=server), tmp_path / "far.sock")
    eventually(lambda: not tunnel.alive())


def test_the_users_ssh_config_does_not_reach_openssh(shell: Shell, home: Path, tmp_path: Path) -> None:
    (home / ".ssh/config").write_text(
        f"Host *\n  ControlMaster auto\n  ControlPath {tmp_path}/master\n  LocalForward {tmp_path}/more.sock /x\n"
        "  ProxyCommand false\n  StrictHostKeyChecking no\n"
    )
    tunnel = open_tunnel(shell, str(tmp_path / "far.sock"), openssh_client=True)
    assert tunnel.alive()
    assert not list(tmp_path.glob("master*")) and not (tmp_path / "more.sock").exists()
    tunnel.close()


def test_openssh_goes_only_to_the_host_key_that_the_shell_saw(shell: Shell, tmp_path: Path) -> None:
    other = paramiko.PKey.from_path(make_key(tmp_path / "other"))
    shell.hops = (replace(shell.hops[0], host_key=other),)
    with pytest.raises(BoardUnreachable, match="ssh made no tunnel") as refused:
        open_tunnel(shell, str(tmp_path / "far.sock"), openssh_client=True)
    assert "Host key verification failed" in refused.value.detail


@pytest.mark.skipif(not IS_ROOT, reason="an sshd that is not root's takes no passwords")
def test_a_password_leads_through_our_own_connection(
    sshd: Sshd, log_in: LogIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIL_SSH_PASSWORD", PASSWORD)
    shell = log_in(f"{PASSWORD_USER}@{LOOPBACK}:{sshd.port}", identity="")
    shell.run(["true"])  # it may write the login down after it has let us in
    logins = sshd.log.count("Accepted")
    tunnel = open_tunnel(shell, str(tmp_path / "far.sock"))
    assert tunnel.alive() and sshd.log.count("Accepted") == logins
    tunnel.close()


HOLDER = """
import sys, time
from dataclasses import replace
from pathlib import Path
from hil.core.board_config import Connection
from hil.controller.devices.ssh.connect import open_shell
from hil.controller.devices.ssh.tunnel import open_tunnel
connection = Connection(identity=sys.argv[2], known_hosts=sys.argv[3])
shell = open_shell(sys.argv[1], connection, board="b", base=Path("/"))
tunnel = open_tunnel(shell, "/nothing.sock", openssh_client=True)
print("ready")
print(tunnel.address, flush=True)
time.sleep(1000)
"""


def test_no_ssh_outlives_a_controller_that_was_killed(sshd: Sshd, tmp_path: Path) -> None:
    (tmp_path / "holder.py").write_text(HOLDER)
    arguments = [str(tmp_path / "holder.py"), sshd.address, str(sshd.identity), str(sshd.known_hosts)]
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"ready\n"
        folder = Path(holder.stdout.readline().decode().strip().removeprefix("unix:")).parent
        assert folder.exists()
        started = descendants(holder.pid)
        assert len(started) >= 2
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    eventually(lambda: not any(is_running(pid) for pid in started))
    assert not folder.exists()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

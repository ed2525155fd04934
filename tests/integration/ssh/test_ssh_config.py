"""The user's ssh config: aliases, keys and jump hosts."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.sshd import BOTH, IS_ROOT, LOOPBACK, PASSWORD, PASSWORD_USER, Sshd, descendants, make_key, running_sshd
from support.waiting import eventually

from hil.controller.devices.ssh.errors import HostKeyRefused
from hil.controller.devices.ssh.shell import Shell
from hil.controller.devices.ssh.tunnel import open_tunnel
from hil.errors import BoardRefused, BoardUnreachable, UsageError

LogIn = Callable[..., Shell]
pytestmark = pytest.mark.parametrize(*BOTH, indirect=True)


def entry(name: str, server: Sshd, *more: str) -> str:
    lines = [
        f"HostName {LOOPBACK}",
        f"Port {server.port}",
        f"User {server.user}",
        f'IdentityFile "{server.identity}"',
        f'UserKnownHostsFile "{server.known_hosts}"',
    ]
    return "\n  ".join([f"Host {name}", *lines, *more]) + "\n"


def test_ssh_alias_sets_all_connection_options(sshd: Sshd, log_in: LogIn, home: Path) -> None:
    (home / ".ssh/config").write_text(entry("pi", sshd))
    shell = log_in("ssh:pi", identity="", known_hosts="")
    assert shell.run(["id", "-un"]).text == sshd.user
    assert shell.address == f"{sshd.user}@pi:{sshd.port}"


def test_client_ignores_fabric_config(sshd: Sshd, log_in: LogIn, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".fabric.yml").write_text("user: nobody\nconnect_kwargs: {password: x}\n")
    monkeypatch.setenv("FABRIC_USER", "nobody")
    assert log_in(f"ssh:{LOOPBACK}:{sshd.port}").user == sshd.user


def test_explicit_options_override_config(sshd: Sshd, log_in: LogIn, home: Path, tmp_path: Path) -> None:
    (home / ".ssh/config").write_text(entry("pi", sshd))
    with pytest.raises(HostKeyRefused, match="unknown host key"):
        log_in("ssh:pi", known_hosts=str(tmp_path / "none"))
    with pytest.raises(BoardRefused, match="nobody@"):
        log_in("nobody@pi")
    with pytest.raises(BoardUnreachable, match="refused"):
        log_in("ssh:pi:1")


def test_included_files_apply_within_their_block(sshd: Sshd, log_in: LogIn, home: Path) -> None:
    (home / ".ssh/boards").mkdir()
    (home / ".ssh/boards/pi").write_text(entry("pi", sshd))
    # Relative to the home directory of the user database, which differs from this one.
    (home / ".ssh/config").write_text(f"Include={home}/.ssh/boards/*\nIdentityFile {sshd.identity}\n")
    log_in("ssh:pi", identity="", known_hosts="")
    log_in(identity="")


def test_identities_only_ignores_agent_keys(
    sshd: Sshd, log_in: LogIn, home: Path, tmp_path: Path, agent: Callable[[Path], None]
) -> None:
    make_key(tmp_path / "stranger")
    agent(sshd.identity)
    log_in(identity="")
    (home / ".ssh/config").write_text(f"Host *\n IdentitiesOnly yes\n IdentityFile {tmp_path}/stranger\n")
    with pytest.raises(BoardRefused, match=rf"tried: [^,]*{tmp_path}/stranger[^,]* \["):
        log_in(identity="")


def test_proxy_jump_connects_through_gateway(log_in: LogIn, sshd: Sshd, home: Path, tmp_path: Path) -> None:
    with running_sshd(tmp_path / "jump") as jump:
        config = entry("gate", jump) + entry("pi", sshd, "ProxyJump gate") + "Host *\n  ForwardAgent yes\n"
        (home / ".ssh/config").write_text(config)
        shell = log_in("ssh:pi", identity="", known_hosts="")
        assert shell.run(["printenv", "SSH_CONNECTION"]).text.endswith(f" {LOOPBACK} {sshd.port}")
        assert jump.log.count("Accepted publickey") == 1
        tunnel = open_tunnel(shell, str(tmp_path / "nothing.sock"))
        assert tunnel.alive()
        assert jump.log.count("Accepted publickey") == 1
        tunnel.close()


def test_proxy_jump_verifies_host_key_of_gateway(log_in: LogIn, sshd: Sshd, home: Path, tmp_path: Path) -> None:
    with running_sshd(tmp_path / "jump") as jump:
        jump.known_hosts.unlink()
        (home / ".ssh/config").write_text(entry("gate", jump) + entry("pi", sshd, "ProxyJump gate"))
        with pytest.raises(HostKeyRefused, match=rf"unknown host key of \[{LOOPBACK}\]:{jump.port}"):
            log_in("ssh:pi", identity="")


def test_proxy_jump_failure_names_gateway(log_in: LogIn, sshd: Sshd, home: Path) -> None:
    lost = entry("pi", sshd, "ProxyJump gate").replace(f"Port {sshd.port}", "Port 1")
    (home / ".ssh/config").write_text(entry("gate", sshd) + lost)
    with pytest.raises(BoardUnreachable, match=rf"cannot connect to (pi|\[{LOOPBACK}\]:1) through (gate|{LOOPBACK})"):
        log_in("ssh:pi")


def test_proxy_jump_none_connects_directly(log_in: LogIn, sshd: Sshd, home: Path) -> None:
    (home / ".ssh/config").write_text(entry("pi", sshd, "ProxyJump none"))
    log_in("ssh:pi")


@pytest.mark.skipif(not IS_ROOT, reason="an sshd that is not root's takes no passwords")
def test_proxy_jump_never_sends_board_password(
    log_in: LogIn, sshd: Sshd, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIL_SSH_PASSWORD", PASSWORD)
    with running_sshd(tmp_path / "jump") as jump:
        gate = entry("gate", jump).replace(f"User {jump.user}", f"User {PASSWORD_USER}").replace("/id", "/host_key")
        (home / ".ssh/config").write_text(gate + entry("pi", sshd, "ProxyJump gate"))
        with pytest.raises(
            BoardRefused, match=f"{PASSWORD_USER}@{LOOPBACK}(:{jump.port} refused the login|'s password)"
        ):
            log_in("ssh:pi")
        assert "Failed publickey" in jump.log and "Failed password" not in jump.log


RELAY = """
import os, socket, sys, threading
way = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def out():
    while data := way.recv(65536): os.write(1, data)
    os._exit(0)
threading.Thread(target=out).start()
while data := os.read(0, 65536): way.sendall(data)
way.shutdown(socket.SHUT_WR)
"""


def test_proxy_command_replaces_connection(log_in: LogIn, sshd: Sshd, home: Path, tmp_path: Path) -> None:
    (tmp_path / "relay.py").write_text(RELAY)
    command = shlex.join([sys.executable, str(tmp_path / "relay.py")])
    (home / ".ssh/config").write_text(entry("pi", sshd, f"ProxyCommand {command} %h %p"))
    shell = log_in("ssh:pi", identity="", known_hosts="")
    assert shell.run(["id", "-un"]).text == sshd.user
    tunnel = open_tunnel(shell, str(tmp_path / "nothing.sock"))
    assert tunnel.alive()
    tunnel.close()
    shell.close()
    eventually(lambda: not any(str(tmp_path / "relay.py") in command_line(pid) for pid in descendants(os.getpid())))


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def test_explicit_port_reaches_proxy_command(log_in: LogIn, sshd: Sshd, home: Path, tmp_path: Path) -> None:
    (tmp_path / "relay.py").write_text(RELAY)
    command = shlex.join([sys.executable, str(tmp_path / "relay.py")])
    elsewhere = entry("pi", sshd, f"ProxyCommand {command} %h %p").replace(f"Port {sshd.port}", "Port 1")
    (home / ".ssh/config").write_text(elsewhere)
    assert log_in(f"ssh:pi:{sshd.port}", identity="", known_hosts="").run(["id", "-un"]).text == sshd.user


@pytest.mark.parametrize(
    "text",
    [
        *("Host pi\n Port many\n", "Host pi\n ???\n", "Host pi\n UserKnownHostsFile 'a\n"),
    ],
)
def test_invalid_config_raises_usage_error(log_in: LogIn, home: Path, text: str) -> None:
    (home / ".ssh/config").write_text(text)
    with pytest.raises(UsageError):
        log_in("ssh:pi")


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
def test_ipv6_address_logs_in(log_in: LogIn, tmp_path: Path) -> None:
    with running_sshd(tmp_path / "six", listen="::1") as server:
        known = tmp_path / "known_hosts"
        shell = log_in(
            f"{server.user}@[::1]:{server.port}", server=server, known_hosts=str(known), accept_new_host_key=True
        )
        find = ["ssh-keygen", "-F", f"[::1]:{server.port}", "-f", known]
        assert subprocess.run(find, stdout=subprocess.DEVNULL).returncode == 0
        assert shell.address == f"{server.user}@[::1]:{server.port}"
        tunnel = open_tunnel(shell, str(tmp_path / "nothing.sock"))
        assert tunnel.alive()
        tunnel.close()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("no-such-program-anywhere %h %p", ".*no-such-program-anywhere"),
        ("/etc/passwd %h", ".*/etc/passwd"),
        ("false", "exited with"),
    ],
)
def test_failing_proxy_command_error_names_command(log_in: LogIn, home: Path, command: str, said: str) -> None:
    (home / ".ssh/config").write_text(f"Host pi\n ProxyCommand {command}\n")
    started = time.monotonic()
    with pytest.raises(BoardUnreachable, match=f"the ProxyCommand to pi failed: {said}") as refused:
        log_in("root@pi")
    assert time.monotonic() - started < 10
    assert command.split()[0] in refused.value.hint

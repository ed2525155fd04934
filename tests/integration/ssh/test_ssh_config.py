"""The user's ssh config: names, keys, jumps."""

from __future__ import annotations

import shlex
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.sshd import IS_ROOT, LOOPBACK, PASSWORD, PASSWORD_USER, Sshd, make_key, running_sshd

from hil.controller.devices.ssh.known_hosts import HostKeyRefused
from hil.controller.devices.ssh.shell import Shell
from hil.controller.devices.ssh.tunnel import open_tunnel
from hil.errors import BoardRefused, BoardUnreachable, UsageError

LogIn = Callable[..., Shell]


def entry(name: str, server: Sshd, *more: str) -> str:
    lines = [
        f"HostName {LOOPBACK}",
        f"Port {server.port}",
        f"User {server.user}",
        f'IdentityFile "{server.identity}"',
        f'UserKnownHostsFile "{server.known_hosts}"',
    ]
    return "\n  ".join([f"Host {name}", *lines, *more]) + "\n"


def test_a_name_stands_for_all_of_it(sshd: Sshd, log_in: LogIn, home: Path) -> None:
    (home / ".ssh/config").write_text(entry("pi", sshd))
    shell = log_in("ssh:pi", identity="", known_hosts="")
    assert shell.run(["id", "-un"]).text == sshd.user
    assert shell.address == f"{sshd.user}@pi:{sshd.port}"


def test_fabrics_own_config_files_are_not_read(
    sshd: Sshd, log_in: LogIn, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".fabric.yml").write_text("user: nobody\nconnect_kwargs: {password: x}\n")
    monkeypatch.setenv("FABRIC_USER", "nobody")
    assert log_in(f"ssh:{LOOPBACK}:{sshd.port}").user == sshd.user


def test_what_was_given_wins_over_the_config(sshd: Sshd, log_in: LogIn, home: Path, tmp_path: Path) -> None:
    (home / ".ssh/config").write_text(entry("pi", sshd))
    with pytest.raises(HostKeyRefused, match="is not known"):
        log_in("ssh:pi", known_hosts=str(tmp_path / "none"))
    with pytest.raises(BoardRefused, match="nobody@"):
        log_in("nobody@pi")
    with pytest.raises(BoardUnreachable, match="refused"):
        log_in("ssh:pi:1")


def test_included_files_count_and_end_where_they_end(sshd: Sshd, log_in: LogIn, home: Path) -> None:
    (home / ".ssh/boards").mkdir()
    (home / ".ssh/boards/pi").write_text(entry("pi", sshd))
    (home / ".ssh/config").write_text(f"Include=boards/*\nIdentityFile {sshd.identity}\n")
    log_in("ssh:pi", identity="", known_hosts="")
    log_in(identity="")


def test_only_the_configs_identities_where_it_says_so(
    sshd: Sshd, log_in: LogIn, home: Path, tmp_path: Path, agent: Callable[[Path], None]
) -> None:
    make_key(tmp_path / "stranger")
    agent(sshd.identity)
    log_in(identity="")
    (home / ".ssh/config").write_text(f"Host *\n IdentitiesOnly yes\n IdentityFile {tmp_path}/stranger\n")
    with pytest.raises(BoardRefused, match=rf"tried: the key {tmp_path}/stranger \["):
        log_in(identity="")


@pytest.mark.parametrize("openssh_client", [True, False])
def test_through_a_jump(log_in: LogIn, sshd: Sshd, home: Path, tmp_path: Path, openssh_client: bool) -> None:
    with running_sshd(tmp_path / "jump") as jump:
        config = entry("gate", jump) + entry("pi", sshd, "ProxyJump gate") + "Host *\n  ForwardAgent yes\n"
        (home / ".ssh/config").write_text(config)
        shell = log_in("ssh:pi", identity="", known_hosts="")
        assert shell.run(["printenv", "SSH_CONNECTION"]).text.endswith(f" {LOOPBACK} {sshd.port}")
        assert len(shell.hops) == 2 and jump.log.count("Accepted publickey") == 1
        tunnel = open_tunnel(shell, str(tmp_path / "nothing.sock"), openssh_client=openssh_client)
        assert tunnel.alive()
        assert jump.log.count("Accepted publickey") == 1 + openssh_client
        tunnel.close()


def test_a_jumps_host_key_is_checked_too(log_in: LogIn, sshd: Sshd, home: Path, tmp_path: Path) -> None:
    with running_sshd(tmp_path / "jump") as jump:
        jump.known_hosts.unlink()
        (home / ".ssh/config").write_text(entry("gate", jump) + entry("pi", sshd, "ProxyJump gate"))
        with pytest.raises(HostKeyRefused, match=rf"of \[{LOOPBACK}\]:{jump.port} is not known"):
            log_in("ssh:pi", identity="")


def test_a_jump_that_gets_no_further(log_in: LogIn, sshd: Sshd, home: Path) -> None:
    lost = entry("pi", sshd, "ProxyJump gate").replace(f"Port {sshd.port}", "Port 1")
    (home / ".ssh/config").write_text(entry("gate", sshd) + lost)
    with pytest.raises(BoardUnreachable, match=rf"\[{LOOPBACK}\]:1 cannot be reached from {LOOPBACK}"):
        log_in("ssh:pi")


def test_jumps_that_lead_nowhere_else(log_in: LogIn, sshd: Sshd, home: Path) -> None:
    (home / ".ssh/config").write_text("Host a\n ProxyJump b\nHost b\n ProxyJump a\n")
    with pytest.raises(UsageError, match="through itself"):
        log_in("ssh:a")
    (home / ".ssh/config").write_text(entry("pi", sshd, "ProxyJump none"))
    assert len(log_in("ssh:pi").hops) == 1
    (home / ".ssh/config").write_text(entry("gate", sshd) + "Host *\n  ProxyJump gate\n")
    assert len(log_in("ssh:gate").hops) == 1


@pytest.mark.skipif(not IS_ROOT, reason="an sshd that is not root's takes no passwords")
def test_the_boards_password_is_not_for_jumps(
    log_in: LogIn, sshd: Sshd, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIL_SSH_PASSWORD", PASSWORD)
    with running_sshd(tmp_path / "jump") as jump:
        gate = entry("gate", jump).replace(f"User {jump.user}", f"User {PASSWORD_USER}").replace("/id", "/host_key")
        (home / ".ssh/config").write_text(gate + entry("pi", sshd, "ProxyJump gate"))
        with pytest.raises(BoardRefused, match=f"{PASSWORD_USER}@{LOOPBACK}:{jump.port} did not let us in"):
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


@pytest.mark.parametrize("openssh_client", [True, False])
def test_a_command_in_place_of_a_connection(
    log_in: LogIn, sshd: Sshd, home: Path, tmp_path: Path, openssh_client: bool
) -> None:
    (tmp_path / "relay.py").write_text(RELAY)
    command = shlex.join([sys.executable, str(tmp_path / "relay.py")])
    (home / ".ssh/config").write_text(entry("pi", sshd, f"ProxyCommand {command} %h %p"))
    shell = log_in("ssh:pi", identity="", known_hosts="")
    assert shell.run(["id", "-un"]).text == sshd.user
    tunnel = open_tunnel(shell, str(tmp_path / "nothing.sock"), openssh_client=openssh_client)
    assert tunnel.alive()
    tunnel.close()
    proxy = shell.hops[0].proxy
    shell.close()
    assert proxy is not None and proxy.poll() is not None


def test_a_port_that_was_given_reaches_the_command(log_in: LogIn, sshd: Sshd, home: Path, tmp_path: Path) -> None:
    (tmp_path / "relay.py").write_text(RELAY)
    command = shlex.join([sys.executable, str(tmp_path / "relay.py")])
    elsewhere = entry("pi", sshd, f"ProxyCommand {command} %h %p").replace(f"Port {sshd.port}", "Port 1")
    (home / ".ssh/config").write_text(elsewhere)
    assert log_in(f"ssh:pi:{sshd.port}", identity="", known_hosts="").run(["id", "-un"]).text == sshd.user


@pytest.mark.parametrize(
    "text",
    [
        *("Host pi\n Port many\n", "Host pi\n ProxyJump a b c\n", "Host pi\n ???\n"),
        *("Host pi\n UserKnownHostsFile ~nobody-of-that-name/known\n", "Host pi\n UserKnownHostsFile 'a\n"),
        "CanonicalizeHostname yes\nCanonicalDomains invalid\nCanonicalizeFallbackLocal no\n",
    ],
)
def test_a_config_that_makes_no_sense_is_the_users_mistake(log_in: LogIn, home: Path, text: str) -> None:
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
@pytest.mark.parametrize("openssh_client", [True, False])
def test_an_ipv6_address(log_in: LogIn, tmp_path: Path, openssh_client: bool) -> None:
    with running_sshd(tmp_path / "six", listen="::1") as server:
        known = tmp_path / "known_hosts"
        shell = log_in(
            f"{server.user}@[::1]:{server.port}", server=server, known_hosts=str(known), accept_new_host_key=True
        )
        assert known.read_text().startswith(f"[::1]:{server.port} ")
        assert shell.address == f"{server.user}@[::1]:{server.port}"
        tunnel = open_tunnel(shell, str(tmp_path / "nothing.sock"), openssh_client=openssh_client)
        assert tunnel.alive()
        tunnel.close()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("no-such-program-anywhere %h %p", "there is no program 'no-such-program-anywhere'"),
        ("/etc/passwd %h", "'/etc/passwd' cannot be run"),
        ("false", "it ended with code 1"),
    ],
)
def test_a_proxy_command_that_fails_is_named(log_in: LogIn, home: Path, command: str, said: str) -> None:
    (home / ".ssh/config").write_text(f"Host pi\n ProxyCommand {command}\n")
    started = time.monotonic()
    with pytest.raises(BoardUnreachable, match=f"the ProxyCommand to pi failed: {said}") as refused:
        log_in("root@pi")
    assert time.monotonic() - started < 10
    assert command.split()[0] in refused.value.hint

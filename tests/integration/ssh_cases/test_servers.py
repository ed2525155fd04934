"""Old, hardened, slow or non-OpenSSH servers: hil logs in where plain `ssh` does."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ssh_cases.dropbear import running_dropbear
from support.ssh_cases.user import BOTH, Ended, User, host
from support.sshd import Sshd, make_key

SHA1 = (
    "HostKeyAlgorithms ssh-rsa",
    "KexAlgorithms diffie-hellman-group14-sha1,diffie-hellman-group-exchange-sha1",
    "PubkeyAcceptedAlgorithms ssh-rsa,ssh-ed25519",
    "MACs hmac-sha1",
    "Ciphers aes128-cbc,aes128-ctr",
)


def visit(user: User, server: Sshd, *settings: str) -> User:
    """Make the server the user's board."""
    user.take_key(server.identity)
    user.known_hosts.write_text("")
    user.pin(server)
    user.configure(host("board", server, *settings))
    return user


@pytest.mark.parametrize(
    "settings",
    [
        "Ciphers chacha20-poly1305@openssh.com",
        "Ciphers aes256-ctr|MACs umac-128-etm@openssh.com",
        "Ciphers aes128-ctr|MACs umac-64@openssh.com",
        "KexAlgorithms sntrup761x25519-sha512@openssh.com",
        "KexAlgorithms ecdh-sha2-nistp521",
        "KexAlgorithms diffie-hellman-group18-sha512",
        "Ciphers aes256-gcm@openssh.com|MACs hmac-sha2-512",
        "Compression yes|RekeyLimit 100K",
        "PubkeyAcceptedAlgorithms ssh-ed25519",
        "LoginGraceTime 20|MaxAuthTries 1",
        "MaxSessions 1",
        "MaxSessions 2",
        "MaxStartups 2:90:3",
        "AllowTcpForwarding no|AllowStreamLocalForwarding no",
        "DisableForwarding yes",
        "PermitTTY no",
        "PrintLastLog no|PrintMotd yes",
        "ClientAliveInterval 1",
        "VersionAddendum a lab board, do not touch",
        "AuthenticationMethods publickey",
    ],
)
def test_server_setting_allows_login(user: User, start_sshd, settings: str) -> None:
    visit(user, start_sshd(*settings.split("|"))).both().assert_logged_in()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ("DenyUsers root", "Permission denied"),
        ("PermitRootLogin no", "Permission denied"),
        ("PubkeyAuthentication no", "Permission denied (password"),
        ("AuthenticationMethods publickey,password", "Permission denied (password"),
        ("PubkeyAcceptedAlgorithms rsa-sha2-512", "Permission denied"),
        ("RequiredRSASize 4096|HostKeyAlgorithms ssh-ed25519|PubkeyAcceptedAlgorithms ecdsa*", "Permission denied"),
    ],
)
def test_server_setting_refuses_login(user: User, start_sshd, settings: str, text: str) -> None:
    visit(user, start_sshd(*settings.split("|"))).both().assert_refused(text)


def test_client_reports_sha1_only_server(user: User, start_sshd, tmp_path: Path) -> None:
    server = start_sshd(f"HostKey {make_key(tmp_path / 'rsa', kind='rsa')}", *SHA1)
    user.take_key(server.identity)
    user.known_hosts.write_text("")
    user.pin(server, key=tmp_path / "rsa")
    user.configure(host("board", server, "KexAlgorithms curve25519-sha256"))
    user.both().assert_refused("no matching key exchange method found")
    user.configure(host("board", server))
    user.both().assert_equal()


def test_sha1_only_server_logs_in_when_config_allows(user: User, start_sshd, tmp_path: Path) -> None:
    server = start_sshd(f"HostKey {make_key(tmp_path / 'rsa', kind='rsa')}", *SHA1)
    user.take_key(server.identity)
    user.known_hosts.write_text("")
    user.pin(server, key=tmp_path / "rsa")
    allow = ("HostKeyAlgorithms +ssh-rsa", "KexAlgorithms +diffie-hellman-group14-sha1", "MACs +hmac-sha1")
    user.configure(host("board", server, *allow))
    user.both().assert_logged_in()


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("Ciphers aes256-ctr", "no matching cipher found"),
        ("MACs hmac-sha2-512|Ciphers aes128-ctr", "no matching MAC found"),
        ("HostKeyAlgorithms rsa-sha2-512", "no matching host key type found"),
    ],
)
def test_client_reports_missing_common_algorithm(user: User, start_sshd, setting: str, text: str) -> None:
    server = start_sshd("Ciphers aes128-ctr", "MACs hmac-sha2-256", "HostKeyAlgorithms ssh-ed25519")
    visit(user, server, *setting.split("|")).both().assert_refused(text)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(*BOTH, indirect=True)
@pytest.mark.parametrize("seconds", [1, *(pytest.param(long, marks=pytest.mark.slow) for long in (13, 30))])
def test_slow_login_succeeds(user: User, start_sshd, tmp_path: Path, seconds: int) -> None:
    """A directory service that is slow to find the user's keys."""
    find_keys = f'/bin/sh -c "sleep {seconds}; cat {tmp_path}/server/authorized_keys"'
    settings = ("AuthorizedKeysFile none", "AuthorizedKeysCommandUser root", f"AuthorizedKeysCommand {find_keys}")
    visit(user, start_sshd(*settings)).both(timeout=200).assert_logged_in()


def test_long_banner_does_not_break_login(user: User, start_sshd, tmp_path: Path) -> None:
    banner = tmp_path / "banner"
    banner.write_text("Authorised use only.\n" * 300)
    visit(user, start_sshd(f"Banner {banner}")).both().assert_logged_in()


PINGS = pytest.mark.parametrize("kind", [(), ("--runtime-hw-type", "command")], ids=["agent", "command"])


def ping(user: User, kind: tuple[str, ...]) -> Ended:
    return user.run("hil", "board", "ping", "ssh:board", *kind, "--count", "1")


@pytest.mark.parametrize(*BOTH, indirect=True)
@PINGS
@pytest.mark.parametrize(
    ("command", "text"),
    [
        *(("echo no shell for you", "no shell for you"), ("echo no shell for you >&2", "no shell for you")),
        *(("exit 3", "code 3"), ("true", "code 0"), ("internal-sftp", "code")),
    ],
)
def test_client_reports_forced_command(user: User, start_sshd, kind: tuple[str, ...], command: str, text: str) -> None:
    """The server accepts the login and ignores the requested command."""
    visit(user, start_sshd(f"ForceCommand {command}"))
    ended = ping(user, kind)
    assert ended.code == 4 and text in ended.err and "ForceCommand" in ended.err, str(ended)


@pytest.mark.slow
@pytest.mark.parametrize(*BOTH, indirect=True)
@PINGS
@pytest.mark.parametrize("command", ["sleep 1000", "cat"])
def test_client_reports_endless_forced_command(user: User, start_sshd, kind: tuple[str, ...], command: str) -> None:
    visit(user, start_sshd(f"ForceCommand {command}"))
    ended = ping(user, kind)
    assert ended.code == 4 and "ForceCommand" in ended.err, str(ended)


@PINGS
def test_client_reports_forced_command_of_key(user: User, start_sshd, kind: tuple[str, ...]) -> None:
    server = start_sshd()
    server.authorized.write_text(f'command="echo no shell for you" {server.authorized.read_text()}')
    ended = ping(visit(user, server), kind)
    assert ended.code == 4 and "no shell for you" in ended.err and "authorized_keys" in ended.err, str(ended)


@pytest.mark.parametrize("shell", ["/bin/false", "/usr/sbin/nologin"])
def test_client_reports_account_without_shell(user: User, start_sshd, shell: str) -> None:
    visit(user, start_sshd(shell=shell))
    assert user.ssh().code == 1
    ended = ping(user, ("--runtime-hw-type", "command"))
    assert ended.code == 4 and "POSIX sh" in ended.err, str(ended)


@pytest.mark.parametrize(*BOTH, indirect=True)
def test_forced_command_running_original_works(user: User, start_sshd) -> None:
    visit(user, start_sshd('ForceCommand echo logged >&2; exec sh -c "$SSH_ORIGINAL_COMMAND"')).both().assert_equal()
    ended = ping(user, ("--runtime-hw-type", "command"))
    assert ended.code == 0, str(ended)


@pytest.mark.parametrize(
    "options", ["restrict", "no-pty,no-port-forwarding", 'environment="LAB=1"', 'from="127.0.0.0/8"']
)
def test_key_with_options_logs_in(user: User, start_sshd, tmp_path: Path, options: str) -> None:
    server = start_sshd()
    server.authorized.write_text(f"{options} {server.authorized.read_text()}")
    visit(user, server).both().assert_logged_in()


def test_key_with_wrong_from_option_fails(user: User, start_sshd) -> None:
    server = start_sshd()
    server.authorized.write_text(f'from="192.0.2.1" {server.authorized.read_text()}')
    visit(user, server).both().assert_refused("Permission denied")


@pytest.mark.parametrize("options", ["", "-j -k", "-K 1 -I 8", "-W 2048", "-s", "-w|refused", "-g|refused"])
def test_dropbear_with_options_logs_in_like_ssh(user: User, tmp_path: Path, options: str) -> None:
    arguments, _, refused = options.partition("|")
    with running_dropbear(tmp_path / "dropbear", *arguments.split()) as server:
        visit_dropbear(user, server)
        both = user.both()
    if refused and not both.ssh.reached:
        both.assert_refused("Permission denied")
    else:
        both.assert_logged_in()


@pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
def test_dropbear_with_single_host_key_logs_in(user: User, tmp_path: Path, kind: str) -> None:
    with running_dropbear(tmp_path / "dropbear", kind=kind) as server:
        visit_dropbear(user, server)
        user.both().assert_logged_in()


def visit_dropbear(user: User, server: Sshd) -> None:
    """Make dropbear the user's board."""
    visit(user, server)
    user.known_hosts.write_bytes(server.known_hosts.read_bytes())

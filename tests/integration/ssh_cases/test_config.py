"""~/.ssh/config: hil reads it like plain `ssh`, because `ssh` reads it."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import time
from pathlib import Path

import pytest
from support.ssh_cases.user import BOTH, User, host
from support.sshd import LOOPBACK, Sshd

NOWHERE = "Host *\n  HostName nowhere.invalid\n  User nobody\n  ProxyJump vpn.invalid\n"
# Carry a connection from stdin and stdout to an address, and record it.
CARRY = """
import os, socket, sys, threading
link = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def send():
    while data := os.read(0, 65536):
        link.sendall(data)
    link.shutdown(socket.SHUT_WR)
threading.Thread(target=send, daemon=True).start()
while data := link.recv(65536):
    os.write(1, data)
"""


# paramiko reads part of the config. It never connects to a wrong host: it rejects what it does not support.
pytestmark = pytest.mark.parametrize(*BOTH, indirect=True)


@pytest.fixture
def carry(tmp_path: Path) -> str:
    """A command that replaces a connection, without its arguments."""
    (tmp_path / "carry.py").write_text(CARRY)
    return shlex.join([sys.executable, "-S", str(tmp_path / "carry.py")])


def test_host_alias_resolves(keyed: User) -> None:
    keyed.both().assert_logged_in()


@pytest.mark.parametrize("criteria", ["localnetwork 192.0.2.0/24", "tagged lab", "version OpenSSH_1.*", "nonsense x"])
def test_unsupported_match_criterion_never_applies(keyed: User, sshd: Sshd, criteria: str) -> None:
    """An old `ssh` rejects the file. A new one skips the block."""
    keyed.configure(f"Match {criteria}", "  HostName nowhere.invalid", "  User nobody", host("board", sshd))
    both = keyed.both()
    both.assert_equal()
    assert "nowhere" not in both.hil.err
    if both.ssh.reached is None:
        both.assert_refused("Unsupported Match attribute", code=2)


@pytest.mark.parametrize("block", ["Match host elsewhere", "Host elsewhere", "Match user nobody", "Match exec false"])
def test_client_ignores_include_in_unmatched_block(keyed: User, sshd: Sshd, block: str) -> None:
    keyed.write("vpn", NOWHERE)
    keyed.configure(block, "  Include vpn", host("board", sshd))
    keyed.both().assert_logged_in()


@pytest.mark.parametrize(
    "block", ["Match host board", "Host bo*", "Match originalhost board", "Match all", "Match exec true"]
)
def test_include_in_matched_block_applies(keyed: User, sshd: Sshd, block: str) -> None:
    keyed.write("lab/board", host("board", sshd))
    keyed.configure(block, "  Include lab/*")
    keyed.both().assert_logged_in()


@pytest.mark.parametrize(
    "name", ["~/.ssh/lab/*", "{folder}/lab/board", "lab/b[o]ard", "missing lab/board", '"lab/board"']
)
def test_include_finds_files(keyed: User, sshd: Sshd, name: str) -> None:
    keyed.write("lab/board", host("board", sshd))
    keyed.configure(f"Include {name.format(folder=keyed.ssh_folder)}", "Host *", "  User nobody")
    keyed.both().assert_logged_in()


def test_recursive_include_fails(keyed: User) -> None:
    keyed.configure("Include config")
    keyed.both().assert_refused("Too many recursive configuration includes", code=2)


def test_included_block_ends_with_file(keyed: User, sshd: Sshd) -> None:
    keyed.write("lab", "Host elsewhere\n  User nobody\n")
    keyed.configure("Include lab", f"Port {sshd.port}", f"HostName {LOOPBACK}")
    keyed.both().assert_logged_in()


def test_match_host_with_equals_sign_applies(keyed: User, sshd: Sshd) -> None:
    keyed.configure("Match host=board", f"  HostName {LOOPBACK}", f"  Port {sshd.port}")
    keyed.both().assert_logged_in()


def test_match_final_with_negations_applies(keyed: User, sshd: Sshd, carry: str) -> None:
    lines = ("Match final !originalhost elsewhere !exec false", f"  ProxyCommand {carry} {LOOPBACK} {sshd.port}")
    keyed.configure(*lines, host("board", sshd).replace(f"Port {sshd.port}", "Port 1"))
    keyed.pin(sshd, f"[{LOOPBACK}]:1")
    keyed.both().assert_logged_in()


@pytest.mark.parametrize(
    "match",
    [
        *("user root", "localuser root", "localuser nobody,root", "originalhost b*", "host 127.0.0.*"),
        *(
            "host board,127.0.0.1 user root",
            "!host elsewhere user root",
            'exec "test %n = board"',
            'exec "test %r = root"',
        ),
    ],
)
def test_match_applies(keyed: User, sshd: Sshd, match: str) -> None:
    keyed.configure("Host board", f"  HostName {LOOPBACK}", "  User root", f"Match {match}", f"  Port {sshd.port}")
    keyed.both().assert_logged_in()


@pytest.mark.parametrize(
    "match", ["user nobody", "localuser nobody", "host board,!127.0.0.1", "!user root", "canonical"]
)
def test_match_does_not_apply(keyed: User, sshd: Sshd, match: str) -> None:
    lines = ("Host board", f"  HostName {LOOPBACK}", "  User root", f"Match {match}", "  Port 1")
    keyed.configure(*lines, "Match all", f"  Port {sshd.port}")
    keyed.both().assert_logged_in()


def test_match_exec_runs_once(keyed: User, sshd: Sshd) -> None:
    counter = keyed.ssh_folder / "count"
    keyed.configure(f'Match exec "echo %h >>{counter}; cat >/dev/null"', "  Compression no", host("board", sshd))
    assert keyed.ssh().reached
    once = counter.read_text()
    assert once == "board\n"
    assert keyed.ping().code == 0
    assert counter.read_text() == once * 2


def test_match_exec_skips_different_host(keyed: User, sshd: Sshd) -> None:
    ran = keyed.ssh_folder / "ran"
    keyed.configure(f'Match originalhost elsewhere exec "touch {ran}"', host("board", sshd))
    keyed.both().assert_logged_in()
    assert not ran.exists()


def test_commands_leave_stdin_to_calling_loop(keyed: User, sshd: Sshd) -> None:
    keyed.configure("Match exec cat", "  Compression no", host("board", sshd))
    boards = keyed.write("boards.txt", "ssh:board\nssh:board\nssh:board\n")
    command = shlex.join([sys.executable, "-m", "hil.controller.cli.main", "board", "ping", "--count", "1"])
    ended = keyed.run(
        "sh", "-c", f'while read board; do {command} --runtime-hw-type command "$board"; done', stdin=boards
    )
    assert ended.out.count("1 round trips") == 3, str(ended)


@pytest.mark.parametrize(
    "line",
    ["Port {port} # lab", "User root # me", 'IdentityFile "{key}" # mine', "Port={port}"],
)
def test_client_ignores_comment_after_value(keyed: User, sshd: Sshd, line: str) -> None:
    text = line.format(port=sshd.port, key=keyed.ssh_folder / "id_ed25519")
    keyed.configure(host("board", sshd, text))
    keyed.both().assert_logged_in()


def test_host_ignores_patterns_in_comment(keyed: User, sshd: Sshd) -> None:
    keyed.configure("Host other # board", "  HostName nowhere.invalid", host("board", sshd))
    keyed.both().assert_logged_in()


def test_canonicalize_without_domains_applies(keyed: User, sshd: Sshd) -> None:
    keyed.configure("CanonicalizeHostname yes", host("board", sshd))
    keyed.both().assert_logged_in()


def test_canonicalize_applies_match_canonical(keyed: User, sshd: Sshd) -> None:
    keyed.configure(
        "CanonicalizeHostname always", "CanonicalizeMaxDots 3", "Host board", f"  HostName {LOOPBACK}", "  User root",
        "Match canonical host 127.0.0.1", f"  Port {sshd.port}",
    )  # fmt: skip
    keyed.both().assert_logged_in()


def test_client_ignores_latin1_comment(keyed: User, sshd: Sshd) -> None:
    keyed.write("config", b"# caf\xe9\n" + host("board", sshd).encode())
    keyed.both().assert_logged_in()


@pytest.mark.parametrize(
    ("before", "after"),
    [("ProxyCommand {carry} %h %p", "ProxyJump vpn.invalid"), ("ProxyJump none", "ProxyCommand false")],
)
def test_first_proxy_setting_applies(keyed: User, sshd: Sshd, carry: str, before: str, after: str) -> None:
    keyed.configure(host("board", sshd, before.format(carry=carry)), f"Host *\n  {after}")
    keyed.both().assert_logged_in()


@pytest.mark.parametrize(
    "arguments", ["%h %p", "$(echo %h) %p", f"{LOOPBACK} %p # %%h %n %r", "$(test %n = board && echo %h) %p"]
)
def test_proxy_command_expands_tokens(keyed: User, sshd: Sshd, carry: str, arguments: str) -> None:
    keyed.configure(host("board", sshd, f"ProxyCommand {carry} {arguments}"))
    keyed.both().assert_logged_in()


def test_client_reports_failing_proxy_command(keyed: User, sshd: Sshd) -> None:
    keyed.configure(host("board", sshd, "ProxyCommand sh -c 'echo no route to the lab >&2; exit 3'"))
    keyed.both().assert_refused("no route to the lab")


def test_proxy_command_none_connects_directly(keyed: User, sshd: Sshd) -> None:
    keyed.configure(host("board", sshd, "ProxyCommand none"), "Host *\n  ProxyCommand false")
    keyed.both().assert_logged_in()


PROXY_FDPASS = """
import array, os, socket, sys
link = socket.create_connection((sys.argv[1], int(sys.argv[2])))
with socket.socket(fileno=os.dup(1)) as out:
    out.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [link.fileno()]))])
"""


def test_proxy_use_fdpass_passes_descriptor(keyed: User, sshd: Sshd, tmp_path: Path) -> None:
    (tmp_path / "pass.py").write_text(PROXY_FDPASS)
    command = shlex.join([sys.executable, "-S", str(tmp_path / "pass.py")])
    keyed.configure(host("board", sshd, f"ProxyCommand {command} %h %p", "ProxyUseFdpass yes"))
    keyed.both().assert_logged_in()


@pytest.mark.parametrize(
    "value",
    [
        *("~/.ssh/board.pem", "%d/.ssh/board.pem", "~/.ssh/%n.pem", "~/.ssh/%k.pem", "${LAB_KEYS}/board.pem"),
        *("~/.ssh/%r-%u.pem", "~/.ssh/%h_%p.pem", '"~/.ssh/my key.pem"', "~/.ssh/100%%.pem"),
    ],
)
def test_identity_file_expands_tokens(user: User, sshd: Sshd, value: str) -> None:
    names = ("board", "root-root", f"{LOOPBACK}_{sshd.port}", "my key", "100%", f"[{LOOPBACK}]:{sshd.port}")
    for name in names:
        user.take_key(sshd.identity, f"{name}.pem")
    user.env["LAB_KEYS"] = str(user.ssh_folder)
    user.configure(host("board", sshd, f"IdentityFile {value}"))
    user.both().assert_equal()
    assert value.endswith("%k.pem") or user.ssh().reached


@pytest.mark.parametrize(
    "value",
    [
        "~/.ssh/hosts/%k",
        "~/.ssh/hosts/%h",
        "${LAB_HOSTS}/lab",
        "/nonexistent ~/.ssh/hosts/lab",
        '"~/.ssh/hosts/the lab"',
        "%d/.ssh/hosts/lab",
    ],
)
def test_known_hosts_file_expands_tokens(keyed: User, sshd: Sshd, value: str) -> None:
    text = keyed.known_hosts.read_text()
    keyed.known_hosts.unlink()
    for name in ("lab", "the lab", LOOPBACK, "board", f"[{LOOPBACK}]:{sshd.port}"):
        keyed.write(f"hosts/{name}", text)
    keyed.env["LAB_HOSTS"] = str(keyed.ssh_folder / "hosts")
    keyed.configure(host("board", sshd, f"UserKnownHostsFile {value}"))
    keyed.both().assert_logged_in()


def test_host_pattern_treats_brackets_literally(keyed: User, sshd: Sshd) -> None:
    keyed.configure("Host b[o]ard", "  User nobody", host("board", sshd))
    keyed.both().assert_logged_in()


@pytest.mark.parametrize("pattern", ["bo?rd", "b*", "elsewhere board", "* !elsewhere", "*,board", '"board"'])
def test_host_pattern_matches(keyed: User, sshd: Sshd, pattern: str) -> None:
    keyed.configure(host(pattern, sshd), "Host *", "  HostName nowhere.invalid")
    keyed.both().assert_equal()


@pytest.mark.parametrize("pattern", ["* !board", "BOARD", "board.", "!elsewhere", "board,elsewhere"])
def test_host_pattern_does_not_match(keyed: User, sshd: Sshd, pattern: str) -> None:
    keyed.configure(host(pattern, sshd, hostname="nowhere.invalid"), host("board", sshd))
    keyed.both().assert_logged_in()


def test_first_value_applies(keyed: User, sshd: Sshd) -> None:
    keyed.configure(f"Port {sshd.port}", host("board", sshd, "Port 1"), "Host *", "  User nobody")
    keyed.both().assert_logged_in()


def test_hostname_expands_alias_token(keyed: User, sshd: Sshd) -> None:
    keyed.configure("Host 0.1", "  HostName 127.0.%h", f"  Port {sshd.port}")
    keyed.both("0.1").assert_logged_in()


@pytest.mark.parametrize("text", ["{}", '"{}"', "={}", " = {}", "\t{}"], ids=repr)
def test_value_syntax_matches_ssh(keyed: User, sshd: Sshd, text: str) -> None:
    lines = [f"{key} {value}" for key, value in (("hostname", LOOPBACK), ("PORT", sshd.port), ("uSeR", "root"))]
    lines = [
        f"{line.partition(' ')[0]}{' ' if text[0] in '{' + chr(34) else ''}{text.format(line.partition(' ')[2])}"
        for line in lines
    ]
    keyed.configure("Host board", *lines)
    keyed.both().assert_logged_in()


@pytest.mark.parametrize("line", ["NoSuchOption yes", "Port many", "Ciphers rot13", 'User "root', "Match final exec"])
def test_invalid_config_gives_usage_error(keyed: User, line: str) -> None:
    keyed.configure("Host *", f"  {line}")
    keyed.both().assert_refused("line 2", code=2)


def test_ignore_unknown_skips_listed_options(keyed: User, sshd: Sshd) -> None:
    keyed.configure("IgnoreUnknown UseKeychain,Future*", "UseKeychain yes", "FutureOption 1", host("board", sshd))
    keyed.both().assert_logged_in()


@pytest.mark.parametrize("mode", [0o602, 0o666])
def test_world_writable_config_fails(keyed: User, mode: int) -> None:
    (keyed.ssh_folder / "config").chmod(mode)
    keyed.both().assert_refused("Bad owner or permissions", code=2)


def test_world_readable_config_applies(keyed: User) -> None:
    (keyed.ssh_folder / "config").chmod(0o644)
    keyed.both().assert_logged_in()


def test_config_of_different_owner_fails(keyed: User) -> None:
    os.chown(keyed.ssh_folder / "config", 12345, 12345)
    keyed.both().assert_refused("Bad owner or permissions", code=2)


def test_world_writable_included_file_fails(keyed: User, sshd: Sshd) -> None:
    keyed.write("lab", host("board", sshd)).chmod(0o622)
    keyed.configure("Include lab")
    keyed.both().assert_refused("Bad owner or permissions", code=2)


def test_user_config_precedes_system_config(keyed: User, sshd: Sshd) -> None:
    keyed.configure("Host board", f"  Port {sshd.port}")
    keyed.namespace.system_config.write_text(f"Host board\n  Port 1\n  HostName {LOOPBACK}\n")
    keyed.both().assert_logged_in()


def test_missing_config_logs_in(keyed: User, sshd: Sshd) -> None:
    (keyed.ssh_folder / "config").unlink()
    keyed.both(f"root@{LOOPBACK}", f"root@{LOOPBACK}:{sshd.port}", ssh=("-p", str(sshd.port))).assert_logged_in()


def test_host_pattern_distinguishes_case(keyed: User, sshd: Sshd) -> None:
    """Patterns are case-sensitive. Host names are not."""
    keyed.configure(host("board", sshd, "Port 1"), "Host BOARD", f"  HostName {LOOPBACK}", f"  Port {sshd.port}")
    keyed.both("BOARD").assert_logged_in()


def test_address_overrides_config(keyed: User, sshd: Sshd) -> None:
    keyed.configure(host("board", sshd, "Port 1", "User nobody"))
    keyed.both("root@board", f"root@board:{sshd.port}", ssh=("-p", str(sshd.port))).assert_logged_in()


@pytest.mark.parametrize("address", ["ssh://root@127.0.0.1:{port}", "ssh://127.0.0.1:{port}", "ssh://board"])
def test_address_accepts_ssh_url(keyed: User, sshd: Sshd, address: str) -> None:
    text = address.format(port=sshd.port)
    keyed.both(text, text).assert_logged_in()


def test_bind_address_applies(keyed: User, sshd: Sshd) -> None:
    keyed.configure(host("board", sshd, "BindAddress 127.0.0.7"))
    both = keyed.both()
    both.assert_logged_in()
    assert both.ssh.reached and both.ssh.reached[0] == "127.0.0.7"


def test_address_family_applies(keyed: User, sshd: Sshd) -> None:
    keyed.configure(host("board", sshd, "AddressFamily inet6"))
    keyed.both().assert_refused("Could not resolve hostname")


def test_client_reports_unknown_host_name(keyed: User) -> None:
    keyed.both("root@no-such-board.invalid", "root@no-such-board.invalid").assert_refused("Could not resolve hostname")


def test_client_reports_refused_connection(keyed: User, sshd: Sshd) -> None:
    keyed.configure(host("board", sshd, "Port 1"))
    keyed.both().assert_refused("Connection refused")


def test_connect_timeout_limits_wait(keyed: User, sshd: Sshd) -> None:
    """A server that accepts connections and sends no data."""
    with socket.create_server((LOOPBACK, 0)) as silent:
        keyed.configure(host("board", sshd, f"Port {silent.getsockname()[1]}", "ConnectTimeout 1"))
        started = time.monotonic()
        keyed.both().assert_refused("timed out")
        assert time.monotonic() - started < 15


@pytest.mark.slow
def test_connect_timeout_extends_default_wait(keyed: User, sshd: Sshd, tmp_path: Path) -> None:
    """A server that greets after more than hil's default of ten seconds."""
    slow = tmp_path / "slow.py"
    slow.write_text(f"import time\ntime.sleep(11)\n{CARRY}")
    command = shlex.join([sys.executable, "-S", str(slow)])
    keyed.configure(host("board", sshd, "ConnectTimeout 40", f"ProxyCommand {command} %h %p"))
    keyed.both().assert_logged_in()


@pytest.mark.timeout(240)
@pytest.mark.slow
@pytest.mark.parametrize("way", ["ProxyJump gate", "ProxyCommand {carry} %h %p"])
def test_slow_gateway_login_succeeds(keyed: User, sshd: Sshd, start_sshd, tmp_path: Path, way: str) -> None:
    find_keys = f'/bin/sh -c "sleep 13; cat {tmp_path}/gate/authorized_keys"'
    settings = ("AuthorizedKeysFile none", "AuthorizedKeysCommandUser root", f"AuthorizedKeysCommand {find_keys}")
    gate = start_sshd(*settings, name="gate")
    gate.authorize(sshd.identity)
    keyed.pin(gate)
    slow = tmp_path / "slow.py"
    slow.write_text(f"import time\ntime.sleep(13)\n{CARRY}")
    carry = shlex.join([sys.executable, "-S", str(slow)])
    keyed.configure(host("board", sshd, way.format(carry=carry)), host("gate", gate))
    keyed.both(timeout=200).assert_logged_in()


@pytest.mark.parametrize(
    "form", ["gate", "root@gate", "gate:{gate}", "root@127.0.0.1:{gate}", "ssh://gate", "gate,second"]
)
def test_proxy_jump_logs_in_through_gateway(keyed: User, sshd: Sshd, other_sshd: Sshd, form: str) -> None:
    other_sshd.authorize(sshd.identity)
    keyed.pin(other_sshd)
    jump = form.format(gate=other_sshd.port)
    keyed.configure(host("board", sshd, f"ProxyJump {jump}"), host("gate", other_sshd), host("second", sshd))
    keyed.both().assert_logged_in()
    assert other_sshd.log.count("Accepted publickey") >= 2


def test_client_reports_failing_proxy_jump(keyed: User, sshd: Sshd, other_sshd: Sshd) -> None:
    keyed.configure(host("board", sshd, "ProxyJump gate"), host("gate", other_sshd, "User stranger"))
    keyed.pin(other_sshd)
    keyed.both().assert_refused("stranger@127.0.0.1: Permission denied")


def test_unknown_gateway_key_fails_verification(keyed: User, sshd: Sshd, start_sshd) -> None:
    gate = start_sshd(name="gate")
    keyed.configure(host("board", sshd, "ProxyJump gate"), host("gate", gate))
    keyed.both().assert_refused("Host key verification failed")


FORWARDS = "LocalForward 127.0.0.1:1 127.0.0.1:1|RemoteForward 127.0.0.1:1 127.0.0.1:1|DynamicForward 127.0.0.1:1"


@pytest.mark.parametrize(
    "settings",
    [
        "RequestTTY force|ForwardAgent yes|ForwardX11 yes|EscapeChar none|SetEnv LAB=1|SendEnv LAB*|VisualHostKey yes",
        "LogLevel DEBUG|Compression yes|UpdateHostKeys yes|HashKnownHosts yes|CheckHostIP yes|VerifyHostKeyDNS yes",
        "LogLevel QUIET|ServerAliveInterval 1|TCPKeepAlive no|IPQoS none|RekeyLimit 64K|ConnectionAttempts 3|Tunnel no",
        "PermitLocalCommand yes|LocalCommand echo local >&2|BatchMode yes|NumberOfPasswordPrompts 0",
        f"ExitOnForwardFailure no|{FORWARDS}",
    ],
)
def test_unrelated_settings_do_not_break_login(keyed: User, sshd: Sshd, settings: str) -> None:
    keyed.configure(host("board", sshd, *settings.split("|")))
    keyed.both().assert_logged_in()


@pytest.mark.parametrize(
    "settings",
    [
        "RemoteCommand uptime|StdinNull yes|SessionType none|ForkAfterAuthentication yes",
        "ExitOnForwardFailure yes|" + FORWARDS,
    ],
)
def test_client_ignores_session_settings(keyed: User, sshd: Sshd, settings: str) -> None:
    """They apply to interactive sessions: plain ssh with a command refuses or hangs."""
    keyed.configure(host("board", sshd, *settings.split("|")))
    ended = keyed.hil()
    assert ended.reached, str(ended)


def test_client_ignores_control_master_of_config(keyed: User, sshd: Sshd) -> None:
    keyed.configure(host("board", sshd, "ControlMaster auto", "ControlPath ~/.ssh/ctl-%C", "ControlPersist 20"))
    ended = keyed.hil()
    assert ended.reached, str(ended)
    assert not list(keyed.ssh_folder.glob("ctl-*"))

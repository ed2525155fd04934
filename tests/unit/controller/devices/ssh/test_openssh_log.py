"""Errors derived from ssh output (OpenSSH 9.2)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hil.controller.devices.ssh.address import parse_address
from hil.controller.devices.ssh.errors import (
    HostKeyRefused,
    LoginRefused,
    LoginSlow,
    NoSuchHost,
    ProxyFailed,
    TurnedAway,
)
from hil.controller.devices.ssh.openssh.log import Log, make_config_error
from hil.core.board_config import Connection
from hil.errors import BoardUnreachable, HilError, StorageError, UsageError

CONNECTING = ["debug1: Connecting to 10.0.0.7 [10.0.0.7] port 2222."]
GREETED = [*CONNECTING, "debug1: Authenticating to 10.0.0.7:2222 as 'root'"]
SHOWN = [*GREETED, "debug1: Server host key: ssh-ed25519 SHA256:abc"]
TRUSTED = [*SHOWN, "debug1: SSH2_MSG_NEWKEYS received", "debug1: Will attempt key: /k ED25519 SHA256:k explicit"]
OFFERED = [*TRUSTED, "debug1: Offering public key: /k ED25519 SHA256:k explicit"]
JUMP = [
    "debug1: Setting implicit ProxyCommand from ProxyJump: ssh -F /c -W '[%h]:%p' gate",
    "debug1: Executing proxy command: exec ssh -F /c -W '[10.0.0.7]:22' gate",
]
PROXY = ["debug1: Executing proxy command: exec nc pi 22"]
CLOSED = ["kex_exchange_identification: Connection closed by remote host", "Connection closed by UNKNOWN port 65535"]
NO_PORT = "ssh: connect to host 10.0.0.7 port 2222: Connection refused"
NO_ZONE = "ssh: connect to host fe80::1 port 22: Invalid argument"
OLD = "Unable to negotiate with 10.0.0.7 port 22: no matching host key type found. Their offer: ssh-rsa"
CHANGED = "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @"
DENIED = "root@10.0.0.7: Permission denied (publickey)."
UNPINNED = "No ED25519 host key is known for gate and you have requested strict checking."
TOO_MANY = "Received disconnect from 10.0.0.7 port 2222:2: Too many authentication failures"
REFUSED_KEY = "Host key verification failed."


def log(own: Sequence[str], others: Sequence[str] = (), **settings: object) -> Log:
    found = Log(parse_address("pi"), Connection(**settings), "b")
    for lines, is_own in ((others, False), (own, True)):
        for line in lines:
            found.feed(line, is_own=is_own)
    return found


@pytest.mark.parametrize(
    ("own", "others", "kind", "message", "hint"),
    [
        (
            ["ssh: Could not resolve hostname pi: Name or service not known"],
            [],
            NoSuchHost,
            "host 'pi' not found",
            "name",
        ),
        (['ssh: Could not resolve host "pi"'], [], NoSuchHost, "host 'pi' not found", "name"),
        ([*CONNECTING, NO_PORT], [], TurnedAway, "refused", "sshd"),
        ([*CONNECTING, NO_ZONE], [], BoardUnreachable, "", "fe80::1%eth0"),
        ([*CONNECTING, "Connection timed out during banner exchange"], [], BoardUnreachable, "in time", "ping"),
        ([*CONNECTING, *CLOSED], [], TurnedAway, "SSH handshake with", "port"),
        ([*GREETED, OLD], [], BoardUnreachable, "ssh-rsa", "HostKeyAlgorithms"),
        (
            [*SHOWN, REFUSED_KEY],
            [],
            HostKeyRefused,
            "unknown host key of [10.0.0.7]:2222: ssh-ed25519 SHA256:abc",
            "ssh-keyscan -p 2222 -t ed25519 10.0.0.7 >> ~/.ssh/known_hosts",
        ),
        (
            [*SHOWN, CHANGED, "Offending RSA key in /x y/known:3", REFUSED_KEY],
            [],
            HostKeyRefused,
            "has changed: it shows ssh-ed25519 SHA256:abc",
            "-f '/x y/known' -R '[10.0.0.7]:2222'",
        ),
        ([*SHOWN, "Host key ED25519 SHA256:abc revoked by file /r", REFUSED_KEY], [], HostKeyRefused, "is revoked", ""),
        (
            [*OFFERED, DENIED],
            [],
            LoginRefused,
            "root@10.0.0.7:2222 refused the login; tried: /k ED25519 SHA256:k",
            "ssh-copy-id root@10.0.0.7:2222",
        ),
        (
            [*OFFERED, "debug1: Server accepts key: /k ED25519 SHA256:k", DENIED],
            [],
            LoginRefused,
            "refused the login",
            "ssh-add /k",
        ),
        (
            [*OFFERED, "Permissions 0644 for '/k' are too open.", DENIED],
            [],
            LoginRefused,
            "refused the login",
            "chmod 600 /k",
        ),
        ([*OFFERED, TOO_MANY], [], LoginRefused, "too many keys were offered (1)", "--identity"),
        ([*OFFERED, "Connection to 10.0.0.7 port 2222 timed out"], [], LoginSlow, "checking the login", "directory"),
        (
            [*OFFERED, "Connection closed by 10.0.0.7 port 2222"],
            [],
            LoginRefused,
            "closed the connection",
            "ssh-copy-id",
        ),
        (
            ["/c line 2: Bad port 'many'.", "/c: terminating, 1 bad configuration options"],
            [],
            UsageError,
            "Bad port",
            "",
        ),
        ([*PROXY, *CLOSED], ["nc: not found"], ProxyFailed, "to pi failed: nc: not found", "`nc pi 22`"),
        ([*PROXY, *CLOSED], [], ProxyFailed, "to pi failed: exited", "`nc pi 22`"),
        ([*JUMP, *CLOSED], ["ssh: Could not resolve hostname gate: x"], NoSuchHost, "'gate'", ""),
        (
            [*JUMP, *CLOSED],
            [UNPINNED, REFUSED_KEY],
            HostKeyRefused,
            "unknown host key of gate",
            "--accept-new-host-key",
        ),
        ([*JUMP, *CLOSED], ["me@gate: Permission denied (publickey)."], LoginRefused, "me@gate refused the login", ""),
        (
            [*JUMP, *CLOSED],
            ["channel 0: open failed: connect failed: No route to host"],
            BoardUnreachable,
            "cannot connect to pi through gate: connect failed: No route to host",
            "",
        ),
    ],
)
def test_error_names_cause_of_ssh_exit(
    own: list[str], others: list[str], kind: type[HilError], message: str, hint: str
) -> None:
    error = log(own, others).error()
    assert type(error) is kind, error
    assert message in error.message and hint in error.hint, error
    assert error.detail


def test_log_reads_facts_from_ssh_lines_only() -> None:
    found = log(OFFERED, ["debug1: Authenticating to evil:1 as 'nobody'", "debug1: Server host key: x SHA256:evil"])
    assert (found.user, found.port, found.fingerprint) == ("root", 2222, "SHA256:abc")


def test_server_banner_does_not_change_error() -> None:
    error = log([*OFFERED, DENIED], [REFUSED_KEY]).error()
    assert type(error) is LoginRefused


def test_log_detects_login_from_ssh_lines_only() -> None:
    words = 'Authenticated to pi ([10.0.0.7]:22) using "publickey".'
    assert not log(SHOWN, [words]).is_logged_in
    assert log([*SHOWN, words]).is_logged_in


def test_log_marks_agent_asked_after_key_exchange() -> None:
    assert not log(SHOWN).is_agent_asked
    assert log([*SHOWN, "debug1: SSH2_MSG_NEWKEYS received"]).is_agent_asked
    assert not log(TRUSTED).is_agent_asked


def test_invalid_identity_raises_usage_error() -> None:
    for line, what in (
        ("no such identity: /k: No such file or directory", "cannot read the identity /k"),
        ('Load key "/k": error in libcrypto', "/k is not a private SSH key"),
    ):
        assert what in str(log([*OFFERED, line, DENIED], identity="/k").error())
        assert type(log([*OFFERED, line, DENIED]).error()) is LoginRefused


def test_unpinned_host_key_raises_storage_error() -> None:
    line = "Failed to add the host to the list of known hosts (/x/known)."
    with pytest.raises(StorageError, match="cannot pin"):
        log([*SHOWN, line], accept_new_host_key=True).check_host_key()
    log([*SHOWN, line]).check_host_key()


def test_changed_host_key_raises_error_after_login() -> None:
    with pytest.raises(HostKeyRefused, match="has changed"):
        log([*SHOWN, CHANGED, *TRUSTED[-2:]]).check_host_key()


@pytest.mark.parametrize(
    "line",
    [
        "debug1: Server host key: ssh-ed25519 SHA256:other",
        "debug1: Authenticating to genuine.host:22 as 'admin'",
        "debug1: SSH2_MSG_NEWKEYS received",
    ],
)
@pytest.mark.parametrize("is_first", [False, True])
def test_contradictory_lines_raise_host_key_refused(line: str, is_first: bool) -> None:
    found = log([line, *TRUSTED] if is_first else [*TRUSTED, line])
    with pytest.raises(HostKeyRefused, match="the server at pi imitates messages of ssh"):
        found.check_host_key()
    assert type(found.error()) is HostKeyRefused


def test_second_login_line_raises_host_key_refused() -> None:
    words = 'Authenticated to pi ([10.0.0.7]:22) using "publickey".'
    log([*TRUSTED, words]).check_host_key()
    with pytest.raises(HostKeyRefused, match="imitates"):
        log([words, *TRUSTED, words]).check_host_key()


def test_rekey_after_login_is_not_contradictory() -> None:
    words = 'Authenticated to pi ([10.0.0.7]:22) using "publickey".'
    again = [*SHOWN[-1:], "debug1: SSH2_MSG_NEWKEYS received"]
    log([*TRUSTED, words, *again]).check_host_key()


def test_key_warnings_after_key_exchange_are_ignored() -> None:
    false = ["Host key for pi has changed", "Offending key in /root/important:1", "revoked", REFUSED_KEY]
    log([*TRUSTED, *false]).check_host_key()
    assert type(log([*TRUSTED, *false, DENIED]).error()) is LoginRefused
    with pytest.raises(HostKeyRefused, match="/k has a different key"):
        log([*SHOWN, CHANGED, "Offending RSA key in /k:3", *TRUSTED[-2:], *false]).check_host_key()


def test_server_cannot_evict_changed_key_warning() -> None:
    with pytest.raises(HostKeyRefused, match="has changed"):
        log([*SHOWN, CHANGED, *TRUSTED[-2:], *(f"line {number}" for number in range(1000))]).check_host_key()


def test_key_hint_quotes_accepted_key() -> None:
    hint = log([*OFFERED, "debug1: Server accepts key: /k;reboot ED25519 SHA256:k", DENIED]).error().hint
    assert "ssh-add '/k;reboot'" in hint


def test_refusal_returns_last_line() -> None:
    lines = [
        "channel 2: open failed: connect failed: open failed",
        "channel 3: open failed: administratively prohibited: x",
    ]
    assert log(lines).find_refusal() == "administratively prohibited: x"
    assert log([]).find_refusal() == ""


def test_log_text_has_bounded_length() -> None:
    assert len(log([f"line {number}" for number in range(10_000)]).text().splitlines()) <= 200


def test_config_error_without_output_mentions_missing_reason() -> None:
    assert "no reason" in make_config_error("").message

"""The supported part of the ssh config; other settings are rejected, not guessed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hil.controller.devices.ssh.address import Address
from hil.controller.devices.ssh.paramiko.config import HostSettings, match_wildcards, read_settings, route
from hil.errors import UsageError

Read = Callable[..., HostSettings]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Return a function that writes ``~/.ssh/config`` and included files, and looks up a host."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("hil.controller.devices.ssh.paramiko.config._SYSTEM", tmp_path / "etc")
    (tmp_path / ".ssh").mkdir()

    def call(text: str, host: str = "pi", **beside: str) -> HostSettings:
        for name, content in {"config": text, **beside}.items():
            (tmp_path / ".ssh" / name).write_text(content)
        return read_settings(Address(host))

    return call


def test_read_settings_supports_documented_keywords(read: Read, tmp_path: Path) -> None:
    found = read(
        "Host pi # the lab's\n IdentityFile ~/a\n IdentityFile /b # mine\n IdentitiesOnly yes\n Port=2222 # odd\n"
        ' HostName 10.0.0.%%\n User me\n UserKnownHostsFile ~/k "%d/with space"\n ProxyCommand nc %h %p # %n\n'
    )
    assert found.address == Address("10.0.0.%", "me", 2222)
    assert found.identities == (tmp_path / "a", Path("/b"))
    assert found.only_identities
    assert found.known_hosts == (tmp_path / "k", tmp_path / "with space")
    assert found.proxy_command == "nc 10.0.0.% 2222 # pi"


def test_read_settings_treats_none_as_empty(read: Read) -> None:
    found = read("IdentityFile none\nUserKnownHostsFile none\n")
    assert (found.identities, found.known_hosts) == ((), ())
    assert (read("").identities, read("").known_hosts) == (None, None)


def test_read_settings_collects_forbidden_methods(read: Read) -> None:
    found = read("PubkeyAuthentication no\nPasswordAuthentication yes\nChallengeResponseAuthentication no\n")
    assert found.forbidden == {"publickey", "keyboard-interactive"}


@pytest.mark.parametrize(
    ("text", "seconds"), [("", None), ("ConnectTimeout 40\n", 40), ("ConnectTimeout none\n", None)]
)
def test_read_settings_reads_connect_timeout(read: Read, text: str, seconds: float | None) -> None:
    assert read(text).connect_timeout == seconds


@pytest.mark.parametrize(("value", "accepts"), [("yes", False), ("ask", False), ("accept-new", True), ("no", True)])
def test_strict_host_key_checking_controls_new_keys(read: Read, value: str, accepts: bool) -> None:
    assert read(f"StrictHostKeyChecking {value}\n").accept_new_host_key is accepts


@pytest.mark.parametrize("mode", [0o620, 0o602])
@pytest.mark.parametrize("name", ["config", "more"])
def test_file_writable_by_others_raises_usage_error(read: Read, tmp_path: Path, name: str, mode: int) -> None:
    text = "Include more\n"
    read(text, more="Port 7\n")
    (tmp_path / ".ssh" / name).chmod(mode)
    with pytest.raises(UsageError, match=f"ssh refuses .*{name}: it is writable by other users") as refused:
        read(text, more="Port 7\n")
    assert "chmod 600" in refused.value.hint


def test_first_value_of_keyword_wins(read: Read) -> None:
    found = read("User first\nHost pi\n User second\n Port 7\nHost *\n Port 8\n")
    assert (found.address.user, found.address.port) == ("first", 7)


def test_include_scope_ends_with_file(read: Read) -> None:
    text = "Include more\nPort 1\nHost b\n Include more\n User outer\n"
    more = "User inner\nHost a\n Port 2\n"
    assert [read(text, host, more=more).address.port for host in "ab"] == [2, 1]
    assert [read(text, host, more=more).address.user for host in "ab"] == ["inner", "inner"]


def test_include_under_other_host_does_not_apply(read: Read) -> None:
    assert not read("Host other\n Include more\n", more="Host *\n ProxyJump vpn\n").jumps


@pytest.mark.parametrize(
    ("patterns", "matches"),
    [
        ("p?", True),
        ("*", True),
        ("other pi", True),
        ("* !pi", False),
        ("pi !p*", False),
        ("PI", False),
        ("[p]i", False),
    ],
)
def test_host_patterns_match_like_ssh(read: Read, patterns: str, matches: bool) -> None:
    assert (read(f"Host {patterns}\n Port 7\n").address.port == 7) is matches


@given(st.text("ab*?", max_size=8), st.text("ab*?\n", max_size=8))
def test_wildcards_match_like_regular_expression(pattern: str, text: str) -> None:
    expression = "".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in pattern)
    assert match_wildcards(pattern, text) is bool(re.fullmatch(expression, text, re.DOTALL))


@pytest.mark.timeout(20)
def test_many_wildcards_match_in_polynomial_time() -> None:
    assert not match_wildcards("*a" * 40 + "b", "a" * 200)


def test_first_of_proxy_command_and_jump_wins(read: Read) -> None:
    found = read("Host pi\n ProxyCommand nc %h\n ProxyJump gate\n")
    assert (found.proxy_command, found.jumps) == ("nc pi", ())
    found = read("Host pi\n ProxyJump gate\n ProxyCommand nc %h\n")
    assert (found.proxy_command, found.jumps) == ("", (Address("gate"),))


def test_harmless_keywords_are_skipped(read: Read) -> None:
    read("AddKeysToAgent yes\nServerAliveInterval 5\nLocalForward 1 x:2\nControlPath ~/%C\nRequestTTY no\n")


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("Port 1\nMatch exec true\n", 2, "Match"),
        ("RevokedHostKeys /x\n", 1, "RevokedHostKeys"),
        ("KnownHostsCommand /x\n", 1, "KnownHostsCommand"),
        ("HostKeyAlias x\n", 1, "HostKeyAlias"),
        ("Host pi\n CertificateFile x\n", 2, "CertificateFile"),
        ("???\n", 1, "invalid ssh setting"),
        ("Port\n", 1, "invalid ssh setting"),
        ("UserKnownHostsFile 'a\n", 1, "quot"),
        ("ProxyJump a b c\n", 1, "expected a single value for proxyjump"),
    ],
)
def test_unsupported_setting_error_names_file_and_line(read: Read, text: str, line: int, what: str) -> None:
    with pytest.raises(UsageError, match=rf"config, line {line}: .*{what}"):
        read(text)


def test_unsupported_setting_of_other_host_passes(read: Read) -> None:
    read("Host other\n HostKeyAlias x\n")


@pytest.mark.parametrize(
    "line",
    [
        *("IdentityFile %C", "IdentityFile ${KEY}", "UserKnownHostsFile ~nobody-of-that-name/x", "Port many"),
        *("Include ~nobody-of-that-name/x", "Include ${LAB}/x", "ProxyJump a:0", "ProxyCommand nc %C"),
        *("IdentitiesOnly perhaps", "PubkeyAuthentication perhaps", "CheckHostIP yes", "ConnectTimeout 1m"),
        *("StrictHostKeyChecking perhaps", "IdentityFile a\0b", "UserKnownHostsFile a\0b", "Include " + "*/" * 2000),
        *("Port " + "9" * 5000, "Port \N{ARABIC-INDIC DIGIT THREE}", "ConnectTimeout " + "9" * 500),
    ],
)
def test_unknown_value_error_names_file_and_line(read: Read, line: str) -> None:
    with pytest.raises(UsageError, match=r"\.ssh/config, line 2: "):
        read(f"# mine\n{line}\n")


def test_recursive_include_raises_usage_error(read: Read) -> None:
    with pytest.raises(UsageError, match="Include settings are nested deeper than"):
        read("Include config\n")


def test_route_follows_jumps_of_jumps(read: Read) -> None:
    read("Host pi\n ProxyJump me@far:7,near\nHost far\n ProxyJump first\nHost near\n ProxyJump ignored\n")
    assert [str(one) for one in route(Address("pi", "root"))] == ["first", "me@far:7", "near", "root@pi"]


def test_route_skips_jump_through_same_host(read: Read) -> None:
    read("Host *\n ProxyJump gate\n")
    assert [str(one) for one in route(Address("pi"))] == ["gate", "pi"]


def test_route_rejects_jump_cycle(read: Read) -> None:
    read("Host a\n ProxyJump b\nHost b\n ProxyJump a\n")
    with pytest.raises(UsageError, match="loop of jump hosts through a"):
        route(Address("a"))

"""Host keys: hil accepts and rejects the same keys as plain `ssh`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.ssh_cases.user import BOTH, User, host
from support.sshd import LOOPBACK, Sshd, make_key, running_sshd

pytestmark = pytest.mark.parametrize(*BOTH, indirect=True)

CHANGED = "REMOTE HOST IDENTIFICATION HAS CHANGED"
FAILED = "Host key verification failed"
ACCEPT = {"ssh": ("-o", "StrictHostKeyChecking=accept-new"), "hil": ("--accept-new-host-key",)}
OLD_KINDS = (
    "* ssh-dss AAAAB3NzaC1kc3MAAACBAP8= old\n"
    "* sk-ssh-ed25519@openssh.com AAAAGnNrLXNzaC1lZDI1NTE5QG9wZW5zc2guY29t token\n"
    "* ssh-quantum@example.org AAAA future\nnot a line\n\n# comment\n"
)


@pytest.fixture(scope="module")
def other_keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Host keys of different types, and an ed25519 key of a different host."""
    folder = tmp_path_factory.mktemp("keys")
    return {kind: make_key(folder / kind, kind=kind) for kind in ("rsa", "ecdsa", "ed25519")}


@pytest.fixture
def unpinned(keyed: User) -> User:
    """The user with an empty known_hosts."""
    keyed.known_hosts.write_text("")
    return keyed


def public(key: Path) -> str:
    """Return the key type and key in known_hosts format."""
    return " ".join(key.with_suffix(".pub").read_text().split()[:2])


def test_unknown_key_fails_verification(unpinned: User) -> None:
    both = unpinned.both()
    both.assert_refused(FAILED)
    assert "--accept-new-host-key" in both.hil.err
    assert unpinned.known_hosts.read_text() == ""


def test_accept_new_pins_same_line_as_ssh(unpinned: User, sshd: Sshd) -> None:
    assert unpinned.ssh("board", *ACCEPT["ssh"]).reached
    pinned = unpinned.known_hosts.read_text()
    unpinned.known_hosts.write_text("")
    assert unpinned.hil("ssh:board", *ACCEPT["hil"]).reached
    assert unpinned.known_hosts.read_text() == pinned
    unpinned.both().assert_logged_in()


def test_changed_key_fails_verification(unpinned: User, sshd: Sshd, other_keys: dict[str, Path]) -> None:
    unpinned.pin(sshd, key=other_keys["ed25519"])
    both = unpinned.both(**ACCEPT)
    both.assert_refused("has changed", FAILED)
    assert CHANGED in both.ssh.err and str(unpinned.known_hosts) in both.hil.err


def test_host_key_alias_finds_key(unpinned: User, sshd: Sshd) -> None:
    unpinned.configure(host("board", sshd, "HostKeyAlias lab-board"))
    unpinned.both().assert_refused(FAILED)
    unpinned.pin(sshd, "lab-board")
    unpinned.both().assert_logged_in()


def test_host_key_alias_names_pinned_key(unpinned: User, sshd: Sshd) -> None:
    unpinned.configure(host("board", sshd, "HostKeyAlias lab-board"))
    assert unpinned.hil("ssh:board", *ACCEPT["hil"]).reached
    assert unpinned.known_hosts.read_text().startswith("lab-board ssh-ed25519 ")
    unpinned.both().assert_logged_in()


@pytest.mark.parametrize(
    "name", ["*", "[127.0.0.?]:*", "[127.0.0.*]:{port}", "*,!elsewhere", "[127.0.0.1]:{port},pi", "[127.0.0.1]:????*"]
)
def test_host_pattern_finds_key(unpinned: User, sshd: Sshd, name: str) -> None:
    unpinned.pin(sshd, name.format(port=sshd.port))
    unpinned.both().assert_logged_in()


@pytest.mark.parametrize(
    "name", ["*,!127.0.0.1,![127.0.0.1]:{port}", "[127.0.0.2]:*", "127.0.0.?1", "!elsewhere", "board"]
)
def test_unmatched_host_pattern_fails_verification(unpinned: User, sshd: Sshd, name: str) -> None:
    unpinned.pin(sshd, name.format(port=sshd.port))
    unpinned.both().assert_refused(FAILED)


def test_key_without_port_applies_to_every_port(unpinned: User, sshd: Sshd) -> None:
    unpinned.pin(sshd, LOOPBACK)
    unpinned.both().assert_logged_in()


def test_key_with_port_overrides_key_without_port(unpinned: User, sshd: Sshd, other_keys: dict[str, Path]) -> None:
    unpinned.pin(sshd, LOOPBACK)
    unpinned.pin(sshd, key=other_keys["ed25519"])
    unpinned.both(**ACCEPT).assert_refused("has changed", FAILED)


def test_wrong_key_without_port_counts_as_unknown(unpinned: User, sshd: Sshd, other_keys: dict[str, Path]) -> None:
    unpinned.pin(sshd, LOOPBACK, key=other_keys["ed25519"])
    unpinned.both().assert_refused(FAILED)
    unpinned.both(**ACCEPT).assert_logged_in()


def test_hashed_name_finds_key(keyed: User) -> None:
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", keyed.known_hosts], check=True, capture_output=True)
    assert LOOPBACK not in keyed.known_hosts.read_text()
    keyed.both().assert_logged_in()


@pytest.mark.parametrize(
    "text", ["{}\r\n", "\t{}", "{} caf\xe9 comment\n", "{}"], ids=["CRLF", "tab", "Latin-1", "no end"]
)
def test_unusual_known_hosts_lines_are_read(unpinned: User, sshd: Sshd, text: str) -> None:
    line = text.format(f"[{LOOPBACK}]:{sshd.port} {public(sshd.host_key)}")
    unpinned.known_hosts.write_bytes((OLD_KINDS + line).encode("latin-1"))
    unpinned.both().assert_logged_in()


def test_second_known_hosts_file_applies(unpinned: User, sshd: Sshd) -> None:
    unpinned.pin(sshd)
    unpinned.known_hosts.rename(unpinned.ssh_folder / "known_hosts2")
    unpinned.both().assert_logged_in()


@pytest.mark.parametrize("value", ["/dev/null", "none", "/nonexistent/known_hosts"])
def test_empty_known_hosts_file_fails_verification(keyed: User, sshd: Sshd, value: str) -> None:
    keyed.configure(host("board", sshd, f"UserKnownHostsFile {value}"))
    keyed.both().assert_refused(FAILED)


def test_known_hosts_option_overrides_default_file(unpinned: User, sshd: Sshd) -> None:
    path = unpinned.write("mine", f"[{LOOPBACK}]:{sshd.port} {public(sshd.host_key)}\n")
    unpinned.both(ssh=("-o", f"UserKnownHostsFile={path}"), hil=("--known-hosts", str(path))).assert_logged_in()


def test_global_known_hosts_file_applies(unpinned: User, sshd: Sshd) -> None:
    path = unpinned.write("global", f"[{LOOPBACK}]:{sshd.port} {public(sshd.host_key)}\n")
    unpinned.configure(host("board", sshd, f"GlobalKnownHostsFile {path}"))
    unpinned.both().assert_logged_in()


def test_known_hosts_command_supplies_key(unpinned: User, sshd: Sshd, tmp_path: Path) -> None:
    command = tmp_path / "hosts"
    command.write_text(f'#!/bin/sh\necho "$1 {public(sshd.host_key)}"\n')
    command.chmod(0o755)
    unpinned.configure(host("board", sshd, f"KnownHostsCommand {command} %H"))
    unpinned.both().assert_logged_in()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_key(tmp_path_factory.mktemp("ca") / "ca")


def certify(authority: Path, key: Path, *options: str) -> None:
    command = ["ssh-keygen", "-q", "-s", authority, "-I", "board", "-h", *options, f"{key}.pub"]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def start_certified(start_sshd, authority: Path, tmp_path: Path):
    """Start an sshd with a certificate of the authority."""

    def start(*options: str) -> Sshd:
        key = make_key(tmp_path / "certified")
        certify(authority, key, *options)
        return start_sshd(f"HostKey {key}", f"HostCertificate {key}-cert.pub")

    return start


def certified_user(user: User, server: Sshd, line: str) -> User:
    user.take_key(server.identity)
    user.configure(host("board", server))
    user.known_hosts.write_text(line + "\n")
    return user


@pytest.mark.parametrize("pattern", ["*", "[127.0.0.*]:*"])
def test_certificate_of_trusted_authority_logs_in(user: User, start_certified, authority: Path, pattern: str) -> None:
    server = start_certified("-n", LOOPBACK)
    certified_user(user, server, f"@cert-authority {pattern} {public(authority)}").both().assert_logged_in()


@pytest.mark.parametrize("options", [("-n", "elsewhere"), ("-n", LOOPBACK, "-V", "20200101:20200102")])
def test_invalid_certificate_fails_verification(user: User, start_certified, authority: Path, options) -> None:
    server = start_certified(*options)
    certified_user(user, server, f"@cert-authority * {public(authority)}").both().assert_refused(FAILED)


def test_certificate_of_unknown_authority_fails_verification(user: User, start_certified, other_keys) -> None:
    server = start_certified("-n", LOOPBACK)
    line = f"@cert-authority * {public(other_keys['ed25519'])}"
    certified_user(user, server, line).both().assert_refused(FAILED)


def test_certificate_for_different_host_fails_verification(user: User, start_certified, authority: Path) -> None:
    server = start_certified("-n", LOOPBACK)
    line = f"@cert-authority elsewhere {public(authority)}"
    certified_user(user, server, line).both().assert_refused(FAILED)


def test_revoked_authority_fails_verification(user: User, start_certified, authority: Path) -> None:
    server = start_certified("-n", LOOPBACK)
    lines = f"@cert-authority * {public(authority)}\n@revoked * {public(authority)}"
    certified_user(user, server, lines).both().assert_refused("revoked", FAILED)


def test_plain_key_suffices_with_authority_line(keyed: User, authority: Path) -> None:
    with keyed.known_hosts.open("a") as file:
        file.write(f"@cert-authority * {public(authority)}\n")
    keyed.both().assert_logged_in()


def test_client_ignores_revoked_line_of_different_host(keyed: User, sshd: Sshd) -> None:
    with keyed.known_hosts.open("a") as file:
        file.write(f"@revoked elsewhere,*,!{LOOPBACK},![{LOOPBACK}]:* {public(sshd.host_key)}\n")
    keyed.both().assert_logged_in()


def test_revoked_line_fails_verification(keyed: User, sshd: Sshd) -> None:
    with keyed.known_hosts.open("a") as file:
        file.write(f"@revoked * {public(sshd.host_key)}\n")
    keyed.both(**ACCEPT).assert_refused("revoked", FAILED)


@pytest.mark.parametrize("form", ["keys", "list"])
def test_revoked_host_keys_file_fails_verification(keyed: User, sshd: Sshd, form: str) -> None:
    revoked = keyed.write("revoked", public(sshd.host_key) + "\n")
    if form == "list":
        subprocess.run(["ssh-keygen", "-q", "-k", "-f", f"{revoked}.krl", revoked], check=True)
        revoked = revoked.with_name("revoked.krl")
    keyed.configure(host("board", sshd, f"RevokedHostKeys {revoked}"))
    keyed.both().assert_refused("revoked", FAILED)


def test_missing_revoked_host_keys_file_fails_verification(keyed: User, sshd: Sshd) -> None:
    keyed.configure(host("board", sshd, "RevokedHostKeys /nonexistent"))
    keyed.both().assert_refused(FAILED)


@pytest.fixture(scope="module")
def many_kinds(tmp_path_factory: pytest.TempPathFactory, other_keys: dict[str, Path]):
    lines = [f"HostKey {other_keys[kind]}" for kind in ("rsa", "ecdsa")]
    with running_sshd(tmp_path_factory.mktemp("kinds"), *lines) as server:
        yield server


@pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
def test_single_pinned_key_type_suffices(user: User, many_kinds: Sshd, other_keys: dict[str, Path], kind: str) -> None:
    user.take_key(many_kinds.identity)
    user.configure(host("board", many_kinds))
    user.known_hosts.write_text("")
    user.pin(many_kinds, key=other_keys[kind])
    user.both().assert_logged_in()


@pytest.mark.parametrize("order", [("ecdsa", "rsa"), ("rsa", "ecdsa")])
def test_pinned_key_type_of_server_matches(user: User, start_sshd, other_keys: dict[str, Path], order) -> None:
    """The server has lost its ecdsa key and gained an ed25519 one."""
    server = start_sshd(f"HostKey {other_keys['rsa']}")
    user.take_key(server.identity)
    user.configure(host("board", server))
    user.known_hosts.write_text("")
    for kind in order:
        user.pin(server, key=other_keys[kind])
    user.both().assert_logged_in()


def test_host_key_algorithms_setting_selects_key(user: User, many_kinds: Sshd, other_keys: dict[str, Path]) -> None:
    user.take_key(many_kinds.identity)
    user.configure(host("board", many_kinds, "HostKeyAlgorithms ecdsa-sha2-nistp256"))
    user.known_hosts.write_text("")
    user.pin(many_kinds)
    user.both().assert_refused(FAILED)
    user.pin(many_kinds, key=other_keys["ecdsa"])
    user.both().assert_logged_in()


def test_loopback_setting_skips_verification(unpinned: User, sshd: Sshd) -> None:
    unpinned.configure(host("board", sshd, "NoHostAuthenticationForLocalhost yes"))
    unpinned.both().assert_logged_in()


def test_two_keys_for_same_host_both_match(unpinned: User, sshd: Sshd, other_keys: dict[str, Path]) -> None:
    unpinned.pin(sshd, key=other_keys["ed25519"])
    unpinned.pin(sshd)
    unpinned.both().assert_logged_in()


def test_user_file_takes_precedence_over_global_file(keyed: User, sshd: Sshd, other_keys: dict[str, Path]) -> None:
    wrong = keyed.write("global", f"[{LOOPBACK}]:{sshd.port} {public(other_keys['ed25519'])}\n")
    keyed.configure(host("board", sshd, f"GlobalKnownHostsFile {wrong}"))
    keyed.both().assert_logged_in()


def test_unreadable_known_hosts_fails_verification(keyed: User) -> None:
    keyed.known_hosts.unlink()
    keyed.known_hosts.mkdir()
    keyed.both().assert_refused(FAILED)


@pytest.mark.parametrize("value", ["accept-new", "no", "off"])
def test_strict_host_key_checking_setting_applies(unpinned: User, sshd: Sshd, value: str) -> None:
    """Do not write known_hosts, so that neither client pins the key for the other."""
    files = "UserKnownHostsFile /dev/null"
    unpinned.configure(host("board", sshd, f"StrictHostKeyChecking {value}", files))
    unpinned.both().assert_logged_in()
    unpinned.configure(host("board", sshd, "StrictHostKeyChecking yes", files))
    unpinned.both().assert_refused(FAILED)

"""Keys and agents: hil logs in with the same key as plain `ssh`."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.ssh_cases.agents import add_key, before, fake_agent, make_security_key, real_agent, string
from support.ssh_cases.user import BOTH, PARAMIKO, User, host
from support.sshd import LOOPBACK, Sshd, make_key

pytestmark = pytest.mark.parametrize(*BOTH, indirect=True)

SILENCE_S = 25.0


@pytest.fixture
def at_agent(user: User, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Give the user a fake agent."""
    contexts = []

    def start(answer: Callable[[bytes], bytes | None]) -> Path:
        contexts.append(fake_agent(tmp_path / "fake.sock", answer))
        user.env["SSH_AUTH_SOCK"] = str(contexts[-1].__enter__())
        return tmp_path / "fake.sock"

    yield start
    for context in contexts:
        context.__exit__(None, None, None)


def test_agent_key_logs_in(user: User, agent: Path, sshd: Sshd) -> None:
    add_key(agent, sshd.identity)
    user.both().assert_logged_in()


def test_client_skips_unusable_security_key(user: User, agent: Path, sshd: Sshd, at_agent: Callable[..., Path]) -> None:
    add_key(agent, sshd.identity)
    blob, line = make_security_key()
    with sshd.authorized.open("a") as file:
        file.write(line)
    at_agent(before(agent, [blob]))
    user.both().assert_logged_in()


def test_security_key_in_agent_does_not_block_identity_file(
    keyed: User, agent: Path, sshd: Sshd, at_agent: Callable[..., Path]
) -> None:
    blob, line = make_security_key()
    with sshd.authorized.open("a") as file:
        file.write(line)
    at_agent(before(agent, [blob]))
    keyed.both().assert_logged_in()


@pytest.mark.parametrize("askpass", ["/bin/false", "/nonexistent"])
def test_client_skips_declined_agent_key(user: User, sshd: Sshd, tmp_path: Path, askpass: str) -> None:
    guarded = make_key(tmp_path / "guarded")
    sshd.authorize(guarded)
    with real_agent(tmp_path, SSH_ASKPASS=askpass, SSH_ASKPASS_REQUIRE="force") as agent:
        user.env["SSH_AUTH_SOCK"] = str(agent)
        add_key(agent, "-c", guarded)
        user.both().assert_refused("Permission denied")
        add_key(agent, sshd.identity)
        user.both().assert_logged_in()


def test_agent_key_bound_to_this_host_logs_in(user: User, agent: Path, sshd: Sshd) -> None:
    add_key(agent, "-H", user.known_hosts, "-h", f"[{LOOPBACK}]:{sshd.port}", sshd.identity)
    both = user.both()
    if user.transport == PARAMIKO:  # paramiko does not report the destination to the agent
        assert both.ssh.reached and both.hil.code == 4 and "ssh-add -h" in both.hil.err, f"hil: {both.hil}"
    else:
        both.assert_logged_in()


def test_client_skips_agent_key_without_server_algorithm(user: User, agent: Path, start_sshd, tmp_path: Path) -> None:
    server = start_sshd("PubkeyAcceptedAlgorithms ssh-ed25519")
    add_key(agent, make_key(tmp_path / "rsa", kind="rsa"))
    add_key(agent, server.identity)
    user.pin(server)
    user.configure(host("board", server))
    user.both().assert_logged_in()


def test_client_skips_agent_key_bound_to_different_host(user: User, agent: Path, sshd: Sshd, tmp_path: Path) -> None:
    bound, other_host = make_key(tmp_path / "bound"), make_key(tmp_path / "other_host")
    sshd.authorize(bound)
    user.pin(sshd, "elsewhere", other_host)
    add_key(agent, "-H", user.known_hosts, "-h", "elsewhere", bound)
    user.both().assert_refused("Permission denied")
    add_key(agent, sshd.identity)
    user.both().assert_logged_in()


def test_client_skips_agent_key_bound_to_different_user(user: User, agent: Path, sshd: Sshd) -> None:
    add_key(agent, "-H", user.known_hosts, "-h", f"nobody@[{LOOPBACK}]:{sshd.port}", sshd.identity)
    user.both().assert_refused("Permission denied")


def test_expired_agent_key_does_not_block_identity(user: User, agent: Path, sshd: Sshd, stranger: Path) -> None:
    add_key(agent, "-t", "1", stranger)
    time.sleep(1.1)
    identity = str(sshd.identity)
    user.both(ssh=("-i", identity), hil=("--identity", identity)).assert_logged_in()


def test_locked_agent_does_not_block_identity(user: User, agent: Path, sshd: Sshd, tmp_path: Path) -> None:
    add_key(agent, sshd.identity)
    askpass = tmp_path / "askpass"
    askpass.write_text("#!/bin/sh\necho sesame\n")
    askpass.chmod(0o700)
    add_key(agent, "-x", SSH_ASKPASS=str(askpass), SSH_ASKPASS_REQUIRE="force")
    user.both().assert_refused("Permission denied")
    identity = str(sshd.identity)
    user.both(ssh=("-i", identity), hil=("--identity", identity)).assert_logged_in()


@pytest.mark.slow
def test_client_reports_silent_agent_in_time(keyed: User, at_agent: Callable[..., Path]) -> None:
    """Plain ssh waits forever. hil does not."""
    at_agent(lambda request: None)
    started = time.monotonic()
    ended = keyed.hil(timeout=2 * SILENCE_S)
    assert time.monotonic() - started < SILENCE_S
    assert ended.reached or (ended.code == 4 and "agent" in ended.err and "SSH_AUTH_SOCK" in ended.err), str(ended)


@pytest.mark.parametrize("answer", [b"", b"\x05", b"\x0c\xff\xff\xff\xff", b"\x0c\x00\x00\x00\x01\x00\x00"])
def test_broken_agent_does_not_block_identity_file(keyed: User, at_agent: Callable[..., Path], answer: bytes) -> None:
    at_agent(lambda request: answer)
    keyed.both().assert_logged_in()


@pytest.mark.parametrize("path", ["nonexistent.sock", "config"])
def test_missing_agent_does_not_block_identity_file(keyed: User, path: str) -> None:
    keyed.env["SSH_AUTH_SOCK"] = str(keyed.ssh_folder / path)
    keyed.both().assert_logged_in()


def test_agent_key_with_latin1_comment_logs_in(user: User, agent: Path, sshd: Sshd, tmp_path: Path) -> None:
    key = tmp_path / "latin1"
    command = [b"ssh-keygen", b"-q", b"-t", b"ed25519", b"-N", b"", b"-C", b"caf\xe9", b"-f", bytes(key)]
    subprocess.run(command, check=True)
    with sshd.authorized.open("ab") as file:
        file.write(key.with_suffix(".pub").read_bytes())
    add_key(agent, key)
    user.both().assert_logged_in()
    user.both(ssh=("-i", str(key)), hil=("--identity", str(key))).assert_logged_in()


def test_client_skips_agent_key_of_unknown_type(
    user: User, agent: Path, sshd: Sshd, at_agent: Callable[..., Path]
) -> None:
    add_key(agent, sshd.identity)
    at_agent(before(agent, [string(b"ssh-quantum@example.org") + string(b"x" * 40)]))
    user.both().assert_logged_in()


@pytest.mark.parametrize("private", [True, False], ids=["private key beside", "public key alone"])
def test_public_identity_selects_agent_key(user: User, agent: Path, sshd: Sshd, stranger: Path, private: bool) -> None:
    add_key(agent, stranger)
    add_key(agent, sshd.identity)
    public = user.take_key(sshd.identity, "board").with_suffix(".pub")
    if not private:
        public.with_suffix("").unlink()
    user.configure(host("board", sshd, f"IdentityFile {public}", "IdentitiesOnly yes"))
    user.both().assert_logged_in()
    user.configure(host("board", sshd))
    user.both(ssh=("-i", str(public)), hil=("--identity", str(public))).assert_logged_in()


@pytest.mark.parametrize("public", [True, False], ids=["with .pub", "without .pub"])
def test_agent_unlocks_encrypted_identity(user: User, agent: Path, sshd: Sshd, tmp_path: Path, public: bool) -> None:
    plain = make_key(tmp_path / "plain")
    sshd.authorize(plain)
    add_key(agent, plain)
    locked = user.take_key(plain, "locked", public=public)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "sesame", "-f", locked], check=True, capture_output=True)
    user.configure(host("board", sshd, f"IdentityFile {locked}", "IdentitiesOnly yes"))
    user.both().assert_logged_in()


def test_encrypted_identity_without_agent_fails(user: User, sshd: Sshd, tmp_path: Path) -> None:
    sshd.authorize(make_key(tmp_path / "locked", passphrase="sesame"))
    user.take_key(tmp_path / "locked")
    both = user.both()
    both.assert_refused("Permission denied")
    assert "ssh-add" in both.hil.err


@pytest.mark.parametrize(
    "value", ["{agent}", "$LAB_AGENT", "${{LAB_FOLDER}}/agent.sock", "%d/.ssh/lab.sock", "~/.ssh/lab.sock"]
)
def test_identity_agent_setting_selects_agent(user: User, agent: Path, sshd: Sshd, value: str) -> None:
    add_key(agent, sshd.identity)
    (user.ssh_folder / "lab.sock").symlink_to(agent)
    user.env |= {"LAB_AGENT": str(agent), "LAB_FOLDER": str(agent.parent)}
    del user.env["SSH_AUTH_SOCK"]
    user.configure(host("board", sshd, f"IdentityAgent {value.format(agent=agent)}"))
    user.both().assert_logged_in()


def test_identity_agent_none_ignores_agent(user: User, agent: Path, sshd: Sshd) -> None:
    add_key(agent, sshd.identity)
    user.configure(host("board", sshd, "IdentityAgent none"))
    user.both().assert_refused("Permission denied")


def test_client_ignores_identity_agent_of_different_host(user: User, agent: Path, sshd: Sshd) -> None:
    add_key(agent, sshd.identity)
    user.configure(host("elsewhere", sshd, "IdentityAgent none"), host("board", sshd, "IdentityAgent SSH_AUTH_SOCK"))
    user.both().assert_logged_in()


@pytest.fixture
def many_keys(agent: Path, tmp_path: Path) -> None:
    for number in range(7):
        add_key(agent, make_key(tmp_path / f"many{number}"))


@pytest.mark.usefixtures("many_keys")
def test_too_many_agent_keys_are_reported(user: User, agent: Path, sshd: Sshd) -> None:
    add_key(agent, sshd.identity)
    both = user.both()
    both.assert_refused("Too many authentication failures")
    assert "--identity" in both.hil.err and "IdentityFile" in both.hil.err


@pytest.mark.usefixtures("many_keys")
def test_named_identity_precedes_agent_keys(user: User, sshd: Sshd) -> None:
    """Plain ssh tries it after the agent keys, unless configured to use no other keys."""
    identity = user.take_key(sshd.identity, "board")
    only = ("-o", "IdentitiesOnly=yes", "-i", str(identity))
    user.both(ssh=only, hil=("--identity", str(identity))).assert_logged_in()
    user.configure(host("board", sshd, f"IdentityFile {identity}", "IdentitiesOnly yes"))
    user.both().assert_logged_in()


@pytest.mark.usefixtures("many_keys")
def test_identity_file_in_agent_precedes_agent_keys(user: User, agent: Path, sshd: Sshd) -> None:
    add_key(agent, sshd.identity)
    user.configure(host("board", sshd, f"IdentityFile {user.take_key(sshd.identity, 'board')}"))
    user.both().assert_logged_in()


def test_identities_only_ignores_other_agent_keys(user: User, agent: Path, sshd: Sshd, stranger: Path) -> None:
    add_key(agent, sshd.identity)
    user.configure(host("board", sshd, "IdentitiesOnly yes", f"IdentityFile {stranger}"))
    user.both().assert_refused("Permission denied")


def test_second_identity_file_logs_in(user: User, sshd: Sshd, stranger: Path) -> None:
    user.take_key(stranger)
    second = user.take_key(sshd.identity, "second")
    user.configure(
        host("board", sshd, "IdentityFile ~/.ssh/missing", f"IdentityFile {stranger}", f"IdentityFile {second}")
    )
    user.both().assert_logged_in()


def test_identity_file_replaces_default_key(keyed: User, sshd: Sshd, stranger: Path) -> None:
    keyed.configure(host("board", sshd, f"IdentityFile {stranger}"))
    keyed.both().assert_refused("Permission denied")


def test_identity_file_none_disables_default_key(keyed: User, sshd: Sshd) -> None:
    keyed.configure(host("board", sshd, "IdentityFile none"))
    keyed.both().assert_refused("Permission denied")


def test_client_ignores_world_readable_identity(user: User, sshd: Sshd) -> None:
    user.take_key(sshd.identity).chmod(0o644)
    user.both().assert_refused("Permission denied")


def test_identity_file_none_still_uses_agent(user: User, agent: Path, sshd: Sshd) -> None:
    add_key(agent, sshd.identity)
    user.configure(host("board", sshd, "IdentityFile none"))
    user.both().assert_logged_in()
    user.configure(host("board", sshd, "IdentityFile none", "IdentitiesOnly yes"))
    user.both().assert_refused("Permission denied")


@pytest.mark.parametrize("setting", ["PubkeyAuthentication no", "PreferredAuthentications password"])
def test_disabled_authentication_method_stays_unused(keyed: User, sshd: Sshd, setting: str) -> None:
    keyed.configure(host("board", sshd, setting))
    keyed.both().assert_refused("Permission denied")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_key(tmp_path_factory.mktemp("ca") / "ca")


def sign(authority: Path, key: Path, *options: str) -> Path:
    """Create a user certificate for a key."""
    certify = ["ssh-keygen", "-q", "-s", authority, "-I", "lab", "-n", "root", *options, f"{key}.pub"]
    subprocess.run(certify, check=True, capture_output=True)
    return key.with_name(f"{key.name}-cert.pub")


@pytest.fixture
def certified(user: User, sshd: Sshd, authority: Path, tmp_path: Path) -> Path:
    """A key that logs in only with a certificate."""
    with sshd.authorized.open("a") as file:
        file.write(f"cert-authority {authority.with_suffix('.pub').read_text()}")
    return make_key(tmp_path / "certified")


def test_certificate_next_to_key_logs_in(user: User, certified: Path, authority: Path) -> None:
    sign(authority, certified)
    identity = str(certified)
    user.both(ssh=("-i", identity), hil=("--identity", identity)).assert_logged_in()


def test_certificate_in_agent_logs_in(user: User, agent: Path, certified: Path, authority: Path) -> None:
    sign(authority, certified)
    add_key(agent, certified)
    user.both().assert_logged_in()


@pytest.mark.parametrize("value", ["{path}", "%d/.ssh/lab-cert.pub", "~/.ssh/lab-cert.pub"])
def test_certificate_file_setting_logs_in(user: User, certified: Path, authority: Path, sshd: Sshd, value: str) -> None:
    path = user.write("lab-cert.pub", sign(authority, certified).read_bytes())
    identity = user.take_key(certified, "lab")
    identity.with_name("lab-cert.pub").rename(path.with_name("lab-cert.pub"))
    sshd_lines = (f"IdentityFile {identity}", f"CertificateFile {value.format(path=path)}")
    user.configure(host("board", sshd, *sshd_lines))
    user.both().assert_logged_in()


def test_expired_certificate_fails(user: User, certified: Path, authority: Path) -> None:
    sign(authority, certified, "-V", "20200101:20200102")
    identity = str(certified)
    user.both(ssh=("-i", identity), hil=("--identity", identity)).assert_refused("Permission denied")


def test_expired_certificate_does_not_block_plain_key(user: User, sshd: Sshd, authority: Path, certified: Path) -> None:
    sign(authority, certified, "-V", "20200101:20200102")
    sshd.authorize(certified)
    identity = str(certified)
    user.both(ssh=("-i", identity), hil=("--identity", identity)).assert_logged_in()


def test_certificate_of_unknown_authority_fails(user: User, stranger: Path, certified: Path) -> None:
    sign(stranger, certified)
    identity = str(certified)
    user.both(ssh=("-i", identity), hil=("--identity", identity)).assert_refused("Permission denied")

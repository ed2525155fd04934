"""SSH logins: accepted methods, and messages for rejected users."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.sshd import BOTH, IS_ROOT, LOOPBACK, PASSWORD, PASSWORD_USER, Relay, Sshd, free_port, make_key

from hil.controller.devices.ssh.shell import Shell
from hil.errors import EXIT_BOARD, BoardRefused, BoardUnreachable, UsageError

LogIn = Callable[..., Shell]
pytestmark = pytest.mark.parametrize(*BOTH, indirect=True)
needs_passwords = pytest.mark.skipif(not IS_ROOT, reason="an sshd that is not root's takes no passwords")


def test_ssh_agent_key_logs_in(sshd: Sshd, log_in: LogIn, agent: Callable[[Path], None]) -> None:
    agent(sshd.identity)
    assert log_in(identity="").run(["id", "-un"]).text == sshd.user


def test_default_key_logs_in(sshd: Sshd, log_in: LogIn, home: Path) -> None:
    sshd.authorize(make_key(home / ".ssh/id_ecdsa", kind="ecdsa"))
    log_in(identity="")


def test_relative_identity_resolves_beside_board_config(sshd: Sshd, log_in: LogIn, tmp_path: Path) -> None:
    sshd.authorize(make_key(tmp_path / "beside"))
    log_in(identity="beside")


def test_login_without_methods_suggests_options(log_in: LogIn) -> None:
    with pytest.raises(BoardRefused, match="refused the login; tried: none") as refused:
        log_in(identity="")
    assert refused.value.exit_code == EXIT_BOARD
    assert "--identity" in refused.value.hint and "HIL_SSH_PASSWORD" in refused.value.hint


def test_rejected_key_suggests_ssh_copy_id(log_in: LogIn, tmp_path: Path) -> None:
    stranger = make_key(tmp_path / "stranger")
    with pytest.raises(BoardRefused, match=f"tried: .*{stranger}") as refused:
        log_in(identity=str(stranger))
    assert "ssh-copy-id" in refused.value.hint


def test_locked_key_suggests_ssh_add_and_agent_unlocks(
    sshd: Sshd, log_in: LogIn, tmp_path: Path, agent: Callable[[Path], None]
) -> None:
    locked = make_key(tmp_path / "locked", passphrase="sesame")
    sshd.authorize(locked)
    with pytest.raises(BoardRefused, match="refused the login") as refused:
        log_in(identity=str(locked))
    assert f"ssh-add {locked}" in refused.value.hint
    asked = {**os.environ, "SSH_ASKPASS": str(tmp_path / "sesame"), "SSH_ASKPASS_REQUIRE": "force"}
    (tmp_path / "sesame").write_text("#!/bin/sh\necho sesame\n")
    (tmp_path / "sesame").chmod(0o700)
    subprocess.run(["ssh-add", "-q", locked], env=asked, check=True)
    log_in(identity=str(locked))


@pytest.mark.parametrize(
    ("name", "said"), [("absent", "cannot read the identity .*No such file"), ("text", "is not a private SSH key")]
)
def test_invalid_identity_raises_usage_error(log_in: LogIn, tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "text").write_text("not a key")
    (tmp_path / "text").chmod(0o600)
    with pytest.raises(UsageError, match=said):
        log_in(identity=str(tmp_path / name))


@needs_passwords
def test_password_from_environment_logs_in(sshd: Sshd, log_in: LogIn, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"{PASSWORD_USER}@{LOOPBACK}:{sshd.port}"
    monkeypatch.setenv("HIL_SSH_PASSWORD", "wrong")
    with pytest.raises(BoardRefused, match=r"refused the login; tried: .*password") as refused:
        log_in(address, identity="")
    assert "wrong" not in str(refused.value)
    monkeypatch.setenv("HIL_SSH_PASSWORD", PASSWORD)
    assert log_in(address, identity="").run(["whoami"]).text == PASSWORD_USER


ASKED = """
import sys
from pathlib import Path
from hil.core.board_config import Connection
from hil.controller.devices.ssh.connect import open_shell
connection = Connection(known_hosts=sys.argv[2])
for attempt in range(2):
    with open_shell(sys.argv[1], connection, board="b", base=Path("/")) as shell:
        print("who:", shell.run(["whoami"]).text)
"""


@needs_passwords
def test_interactive_login_prompts_for_password_once(sshd: Sshd, in_terminal: Callable[..., tuple[bytes, int]]) -> None:
    address = f"{PASSWORD_USER}@{LOOPBACK}:{sshd.port}"
    said, _ = in_terminal(ASKED, address, str(sshd.known_hosts), prompt=b"password: ", answer=PASSWORD.encode())
    assert said.count(b"password: ") == 1
    assert said.count(f"who: {PASSWORD_USER}".encode()) == 2
    assert PASSWORD.encode() not in said


@needs_passwords
def test_end_of_input_at_prompt_ends_login(sshd: Sshd, in_terminal: Callable[..., tuple[bytes, int]]) -> None:
    address = f"{PASSWORD_USER}@{LOOPBACK}:{sshd.port}"
    end_of_input = b"\x04"
    said, _ = in_terminal(ASKED, address, str(sshd.known_hosts), prompt=b"password: ", answer=end_of_input)
    assert said.count(b"password: ") == 1
    assert b"refused the login" in said


def test_missing_home_suggests_setting_home(log_in: LogIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError("no such user")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("hil.controller.devices.ssh.openssh.client.is_usable", lambda: False)
    monkeypatch.delenv("HOME")
    with pytest.raises(UsageError, match="missing user name or home directory") as refused:
        log_in("root@host")
    assert "HOME" in refused.value.hint


def test_closed_port_raises_unreachable(sshd: Sshd, log_in: LogIn) -> None:
    with pytest.raises(BoardUnreachable, match=r"cannot connect to .*: Connection refused"):
        log_in(f"{sshd.user}@{LOOPBACK}:{free_port()}")


@pytest.mark.parametrize("name", ["no-such-board.invalid", "a..b", "a" * 70])
def test_unknown_host_raises_unreachable(log_in: LogIn, name: str) -> None:
    with pytest.raises(BoardUnreachable, match=rf"host '{name}' not found"):
        log_in(f"root@{name}")


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silent", "no ssh"])
def test_non_ssh_port_fails_in_time(log_in: LogIn, greeting: bytes) -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        taken = []

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(listener.accept()[0])
                    taken[-1].sendall(greeting)
                    if greeting:
                        taken[-1].close()

        threading.Thread(target=answer, daemon=True).start()
        started = time.monotonic()
        with pytest.raises(BoardUnreachable, match=r"SSH handshake with|did not respond"):
            log_in(f"root@{LOOPBACK}:{listener.getsockname()[1]}", timeout=1.0)
        assert time.monotonic() - started < 20
        listener.shutdown(socket.SHUT_RDWR)
        for one in taken:
            one.close()


def test_login_retries_after_early_disconnect(sshd: Sshd, log_in: LogIn, tmp_path: Path) -> None:
    relay = Relay(sshd.port, turn_away=1)
    known = tmp_path / "known_hosts"
    sshd.pin(known, relay.port)
    log_in(f"{sshd.user}@{LOOPBACK}:{relay.port}", known_hosts=str(known))
    assert relay.came == 2
    relay.close()


@pytest.mark.parametrize("text", ["root@", "root@a b", "ssh:", "root@-oProxyCommand=x", "root@host:0", "root@host:x"])
def test_login_rejects_invalid_address(log_in: LogIn, text: str) -> None:
    with pytest.raises(UsageError, match="invalid SSH address"):
        log_in(text)


def test_login_ignores_world_readable_key(sshd: Sshd, log_in: LogIn, tmp_path: Path) -> None:
    key = make_key(tmp_path / "open")
    sshd.authorize(key)
    log_in(identity=str(key))
    key.chmod(0o640)
    with pytest.raises(BoardRefused) as refused:
        log_in(identity=str(key))
    assert "chmod 600" in refused.value.hint


def test_unsupported_key_suggests_ssh_add(client: str, log_in: LogIn, tmp_path: Path) -> None:
    if client == "OpenSSH":
        pytest.skip("an ssh uses keys of every kind that ssh-keygen makes")
    key = tmp_path / "token"
    key.touch(mode=0o600)
    key.write_bytes(
        subprocess.run(["openssl", "genpkey", "-algorithm", "X25519"], capture_output=True, check=True).stdout
    )
    with pytest.raises(BoardRefused, match="refused the login") as refused:
        log_in(identity=str(key))
    assert f"ssh-add {key}" in refused.value.hint

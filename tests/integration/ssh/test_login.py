"""Who is let in, and what a user is told who is not."""

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
from support.sshd import IS_ROOT, LOOPBACK, PASSWORD, PASSWORD_USER, Relay, Sshd, free_port, make_key

from hil.controller.devices.ssh.login import exposure
from hil.controller.devices.ssh.openssh import can_log_in
from hil.controller.devices.ssh.shell import Shell
from hil.controller.devices.ssh.tunnel import open_tunnel
from hil.errors import EXIT_BOARD, BoardRefused, BoardUnreachable, UsageError

LogIn = Callable[..., Shell]
needs_passwords = pytest.mark.skipif(not IS_ROOT, reason="an sshd that is not root's takes no passwords")


def test_the_ssh_agent_lets_in(sshd: Sshd, log_in: LogIn, agent: Callable[[Path], None]) -> None:
    agent(sshd.identity)
    assert log_in(identity="").run(["id", "-un"]).text == sshd.user


def test_the_usual_keys_let_in(sshd: Sshd, log_in: LogIn, home: Path) -> None:
    sshd.authorize(make_key(home / ".ssh/id_ecdsa", kind="ecdsa"))
    log_in(identity="")


def test_a_key_is_looked_for_beside_the_config(sshd: Sshd, log_in: LogIn, tmp_path: Path) -> None:
    sshd.authorize(make_key(tmp_path / "beside"))
    log_in(identity="beside")


def test_no_way_in_is_told_with_what_would_be_one(log_in: LogIn) -> None:
    with pytest.raises(BoardRefused, match="did not let us in; tried: nothing") as refused:
        log_in(identity="")
    assert refused.value.exit_code == EXIT_BOARD
    assert "--identity" in refused.value.hint and "HIL_SSH_PASSWORD" in refused.value.hint


def test_a_key_that_the_board_does_not_take(log_in: LogIn, tmp_path: Path) -> None:
    stranger = make_key(tmp_path / "stranger")
    with pytest.raises(BoardRefused, match=f"tried: the key {stranger}") as refused:
        log_in(identity=str(stranger))
    assert "ssh-copy-id" in refused.value.hint


def test_a_locked_key_is_told_and_the_agent_opens_it(
    sshd: Sshd, log_in: LogIn, tmp_path: Path, agent: Callable[[Path], None]
) -> None:
    locked = make_key(tmp_path / "locked", passphrase="sesame")
    sshd.authorize(locked)
    with pytest.raises(BoardRefused, match="did not let us in") as refused:
        log_in(identity=str(locked))
    assert f"ssh-add {locked}" in refused.value.hint
    asked = {**os.environ, "SSH_ASKPASS": str(tmp_path / "sesame"), "SSH_ASKPASS_REQUIRE": "force"}
    (tmp_path / "sesame").write_text("#!/bin/sh\necho sesame\n")
    (tmp_path / "sesame").chmod(0o700)
    subprocess.run(["ssh-add", "-q", locked], env=asked, check=True)
    shell = log_in(identity=str(locked))
    tunnel = open_tunnel(shell, str(tmp_path / "far.sock"), openssh_client=True)
    assert tunnel.alive()
    tunnel.close()


@pytest.mark.parametrize(
    ("name", "said"), [("absent", "cannot read the identity .*No such file"), ("text", "is no private key")]
)
def test_an_identity_that_is_none_is_the_users_mistake(log_in: LogIn, tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "text").write_text("not a key")
    with pytest.raises(UsageError, match=said):
        log_in(identity=str(tmp_path / name))


@needs_passwords
def test_a_password_from_the_environment(sshd: Sshd, log_in: LogIn, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"{PASSWORD_USER}@{LOOPBACK}:{sshd.port}"
    monkeypatch.setenv("HIL_SSH_PASSWORD", "wrong")
    with pytest.raises(BoardRefused, match="did not let us in; tried: a password") as refused:
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
def test_a_password_is_asked_for_once_where_somebody_can_type(
    sshd: Sshd, in_terminal: Callable[..., tuple[bytes, int]]
) -> None:
    address = f"{PASSWORD_USER}@{LOOPBACK}:{sshd.port}"
    said, _ = in_terminal(ASKED, address, str(sshd.known_hosts), prompt=b"password: ", answer=PASSWORD.encode())
    assert said.count(b"password: ") == 1
    assert said.count(f"who: {PASSWORD_USER}".encode()) == 2
    assert PASSWORD.encode() not in said


@needs_passwords
def test_who_has_no_answer_is_asked_no_second_time(sshd: Sshd, in_terminal: Callable[..., tuple[bytes, int]]) -> None:
    address = f"{PASSWORD_USER}@{LOOPBACK}:{sshd.port}"
    end_of_input = b"\x04"
    said, _ = in_terminal(ASKED, address, str(sshd.known_hosts), prompt=b"password: ", answer=end_of_input)
    assert said.count(b"password: ") == 1
    assert b"did not let us in" in said


def test_who_has_no_home_is_told_to_name_one(log_in: LogIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError("no such user")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.delenv("HOME")
    with pytest.raises(UsageError, match="no home") as refused:
        log_in("root@host")
    assert "HOME" in refused.value.hint


def test_a_port_where_nothing_listens(sshd: Sshd, log_in: LogIn) -> None:
    with pytest.raises(BoardUnreachable, match="cannot be reached: Connection refused"):
        log_in(f"{sshd.user}@{LOOPBACK}:{free_port()}")


@pytest.mark.parametrize("name", ["no-such-board.invalid", "a..b", "a" * 70])
def test_a_name_that_does_not_exist(log_in: LogIn, name: str) -> None:
    with pytest.raises(BoardUnreachable, match=rf"there is no host '{name}'"):
        log_in(f"root@{name}")


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silent", "no ssh"])
def test_a_port_that_speaks_no_ssh(log_in: LogIn, greeting: bytes) -> None:
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
        with pytest.raises(BoardUnreachable, match=r"does not go on with SSH|did not answer"):
            log_in(f"root@{LOOPBACK}:{listener.getsockname()[1]}", timeout=1.0)
        assert time.monotonic() - started < 20
        listener.shutdown(socket.SHUT_RDWR)
        for one in taken:
            one.close()


def test_a_server_that_turns_us_away_at_first_is_asked_again(sshd: Sshd, log_in: LogIn, tmp_path: Path) -> None:
    relay = Relay(sshd.port, turn_away=1)
    known = tmp_path / "known_hosts"
    sshd.pin(known, relay.port)
    log_in(f"{sshd.user}@{LOOPBACK}:{relay.port}", known_hosts=str(known))
    assert relay.came == 2
    relay.close()


@pytest.mark.parametrize("text", ["root@", "root@a b", "ssh:", "root@-oProxyCommand=x", "root@host:0", "root@host:x"])
def test_what_is_no_address_is_refused(log_in: LogIn, text: str) -> None:
    with pytest.raises(UsageError, match="is no address for SSH"):
        log_in(text)


def test_a_key_that_others_can_read_is_known_as_such(sshd: Sshd, log_in: LogIn, tmp_path: Path) -> None:
    key = make_key(tmp_path / "open")
    sshd.authorize(key)
    shell = log_in(identity=str(key))
    assert exposure(key) == "" and can_log_in(shell.hops)
    key.chmod(0o640)
    # ssh itself would not use it: neither does a tunnel of its client's.
    assert "permissions 0640" in exposure(key) and "too open" in exposure(key)
    assert not can_log_in(log_in(identity=str(key)).hops)


def test_a_key_that_only_an_agent_can_use_is_told(log_in: LogIn, tmp_path: Path) -> None:
    key = tmp_path / "token"
    key.write_bytes(
        subprocess.run(["openssl", "genpkey", "-algorithm", "X25519"], capture_output=True, check=True).stdout
    )
    with pytest.raises(BoardRefused, match="did not let us in") as refused:
        log_in(identity=str(key))
    assert f"ssh-add {key}" in refused.value.hint

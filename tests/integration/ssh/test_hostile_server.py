"""Hostile SSH servers: hil ends with a typed error, in time and within memory limits."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import paramiko
import pytest
from support.sshd import LOOPBACK, make_key, running_sshd

from hil.controller.devices.ssh.connect import open_shell
from hil.controller.devices.ssh.errors import HostKeyRefused
from hil.controller.devices.ssh.openssh import client as openssh
from hil.controller.devices.ssh.shell import Shell
from hil.controller.devices.ssh.transport import TooMuch
from hil.controller.devices.ssh.tunnel import NoRelay, TcpRelay
from hil.core.board_config import Connection
from hil.errors import BoardError, BoardUnreachable

TextSink = Callable[[paramiko.Channel, bytes], None]


class _Odd(paramiko.ServerInterface):
    """Accept every login. ``greet`` runs before the login, and ``say`` handles the commands."""

    def __init__(self, greet: Callable[[], None], say: TextSink) -> None:
        self._greet = greet
        self._say = say

    def check_auth_none(self, username: str) -> int:
        self._greet()
        return paramiko.AUTH_FAILED

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        _in_background(self._say, channel, command)
        return True


class Server:
    """An SSH server in this process. It stops after the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key: Any = paramiko.RSAKey.generate(2048)
        self.greet: Callable[[paramiko.Transport], None] = lambda transport: None
        self.say: TextSink = lambda channel, command: channel.close()
        self.shells: list[Shell] = []
        self.transports: list[paramiko.Transport] = []
        self._listener = socket.create_server((LOOPBACK, 0))
        self._identity = make_key(folder / "id")
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        try:
            while True:
                near, _ = self._listener.accept()
                transport = paramiko.Transport(near)
                transport.add_server_key(self.key)
                self.transports.append(transport)
                transport.start_server(threading.Event(), _Odd(partial(self.greet, transport), lambda *a: self.say(*a)))
        except OSError:
            pass

    def log_in(self) -> Shell:
        settings = Connection(
            identity=str(self._identity), known_hosts=str(self.folder / "known"), accept_new_host_key=True
        )
        address = f"somebody@{LOOPBACK}:{self._listener.getsockname()[1]}"
        self.shells.append(open_shell(address, settings, board="b", base=self.folder, timeout=5))
        return self.shells[-1]

    def close(self) -> None:
        self._listener.close()
        for shell in self.shells:
            shell.close()
        for transport in self.transports:
            transport.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.close()


def _in_background(call: Callable[..., None], *arguments: object) -> None:
    def work() -> None:
        time.sleep(0.05)  # paramiko sends its reply to the request first
        with contextlib.suppress(OSError, EOFError):
            call(*arguments)

    threading.Thread(target=work, daemon=True).start()


def _write_to_log(transport: paramiko.Transport, text: str) -> None:
    """Send a debug message. ssh writes the text to its log, with line breaks."""
    message = paramiko.Message()
    message.add_byte(bytes([4]))
    message.add_boolean(True)
    message.add_string(text)
    message.add_string("")
    transport._send_message(message)


@pytest.mark.parametrize(
    "line",
    [
        "debug1: Server host key: ssh-ed25519 SHA256:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
        "debug1: Authenticating to genuine.host:22 as 'admin'",
        "debug1: SSH2_MSG_NEWKEYS received",
        "Authenticated to genuine.host",
    ],
)
def test_client_detects_imitated_ssh_log(server: Server, line: str) -> None:
    server.greet = lambda transport: _write_to_log(transport, f"x\n{line}\nx")
    with pytest.raises(HostKeyRefused, match=f"the server at somebody@{LOOPBACK}:.* imitates messages of ssh"):
        server.log_in()


def test_client_ignores_imitated_key_warning(server: Server) -> None:
    lines = "x\nHost key for genuine has changed\nOffending key in /root/important:1\nx"
    server.greet = lambda transport: _write_to_log(transport, lines)
    assert server.log_in().transport.fingerprint == server.key.fingerprint


def test_endless_login_ends_at_time_limit(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openssh, "_LOGIN_SECONDS", 3.0)

    def talk(transport: paramiko.Transport) -> None:
        while transport.is_active():
            _write_to_log(transport, "wait")
            time.sleep(0.2)

    server.greet = talk
    with pytest.raises(BoardUnreachable, match="did not complete the login within 3 s"):
        server.log_in()


class _NoKey(paramiko.RSAKey):
    """An invalid RSA key with impossible numbers."""

    def asbytes(self) -> bytes:
        message = paramiko.Message()
        message.add_string("ssh-rsa")
        message.add_mpint(0)
        message.add_mpint(0)
        return message.asbytes()


def test_client_rejects_invalid_host_key(server: Server) -> None:
    server.key = _NoKey(key=server.key.key)
    with pytest.raises(BoardError, match="SSH handshake with"):
        server.log_in()


def test_client_rejects_non_utf8_message(server: Server) -> None:
    shell = server.log_in()
    message = paramiko.Message()
    message.add_byte(bytes([80]))  # a global request
    message.add_string(b"\xff\xfe")
    message.add_boolean(False)
    server.transports[-1]._send_message(message)
    with pytest.raises(BoardError):
        for _ in range(100):
            shell.run(["true"], timeout=5)


def _say_nothing_of_success(transport: Any) -> None:
    """Stop confirming requests, while still answering keep-alive messages."""
    send = transport._send_user_message
    transport._send_user_message = lambda message: None if message.asbytes()[0] == 99 else send(message)


def test_unconfirmed_command_times_out(server: Server) -> None:
    server.say = lambda channel, command: None
    shell, start = server.log_in(), time.monotonic()
    _say_nothing_of_success(server.transports[-1])
    with pytest.raises(BoardError, match="did not respond within 2 s"):
        shell.run(["true"], timeout=2)
    assert time.monotonic() - start < 15


@pytest.mark.parametrize("client", ["paramiko"], indirect=True)
def test_channel_closes_on_ended_connection(server: Server) -> None:
    """If the transport has not noticed the end, paramiko raises EOFError in the thread that closes the channel."""

    def nobody(message: object) -> None:
        raise EOFError

    with server.log_in() as shell:
        transport = shell.transport._transport
        channel = transport.open_session()
        transport.packetizer.send_message = nobody
        channel.close()
        assert channel.closed
        with pytest.raises(EOFError):
            transport.open_session(timeout=5)


def _begun(*pieces: bytes, endless: bool = False) -> TextSink:
    def say(channel: paramiko.Channel, _: bytes) -> None:
        script = b""
        while b"\n" not in script:
            script += channel.recv(1 << 16)
        channel.sendall(script.split(b";")[0].removeprefix(b"echo ") + b"\n")
        while True:
            for piece in pieces:
                channel.sendall(piece)
            if not endless:
                break
        channel.send_exit_status(0)
        channel.close()

    return say


def _greeting(channel: paramiko.Channel, _: bytes) -> None:
    while True:
        channel.sendall(b"Welcome! " * 1000)


@pytest.mark.slow
@pytest.mark.parametrize("say", [_begun(b"1" * 1000, endless=True), _greeting], ids=["content", "greeting"])
def test_file_transfer_rejects_excess_output(server: Server, tmp_path: Path, say: TextSink) -> None:
    server.say = say
    shell = server.log_in()
    with pytest.raises(BoardError, match="output limit exceeded"):
        shell.get("/x", tmp_path / "back", 100)
    (tmp_path / "data").write_bytes(b"x")
    with pytest.raises(BoardError, match="output limit exceeded"):
        shell.put(tmp_path / "data", "/x")
    assert not list(tmp_path.glob("back*"))


@pytest.mark.parametrize("port", ["²", "0", "65536", "9" * 3000, "-1", ""])
def test_relay_rejects_invalid_port(server: Server, port: str) -> None:
    server.say = _begun(port.encode() + b"\n")
    shell = server.log_in()
    with pytest.raises(NoRelay, match="invalid port"):
        TcpRelay(shell.transport, "python3", "/x")


@pytest.mark.parametrize("say", [_begun(b"1" * 1000, endless=True), _greeting], ids=["line", "greeting"])
def test_relay_rejects_endless_first_line(server: Server, say: TextSink) -> None:
    server.say = say
    shell = server.log_in()
    with pytest.raises(TooMuch):
        TcpRelay(shell.transport, "python3", "/x")


def test_endless_output_stays_within_memory_limit(tmp_path: Path, log_in: Callable[..., Shell]) -> None:
    with running_sshd(
        tmp_path / "loud", "ForceCommand head -c 20000000 /dev/zero | tee /dev/stderr; exec sleep 60"
    ) as loud:
        shell = log_in(server=loud)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(BoardError, match="wrote more than"):
            shell.run(["true"])
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10

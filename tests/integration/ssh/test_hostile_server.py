"""What an SSH server may answer: whatever it says, we end with an error of ours, in time, and within bounds."""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest
from support.sshd import LOOPBACK, make_key, running_sshd

from hil.controller.devices.ssh import shell as files
from hil.controller.devices.ssh import tunnel
from hil.controller.devices.ssh.connect import open_shell
from hil.controller.devices.ssh.shell import Shell
from hil.controller.devices.ssh.tunnel import NoRelay, TcpRelay
from hil.core.board_config import Connection
from hil.errors import BoardError

TextSink = Callable[[paramiko.Channel, bytes], None]


class _Odd(paramiko.ServerInterface):
    """Lets everybody in; what is asked for is answered by ``say``, SFTP by ``sftp``."""

    def __init__(self, say: TextSink, sftp: TextSink | None) -> None:
        self._say, self._sftp = say, sftp

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        _in_background(self._say, channel, command)
        return True

    def check_channel_subsystem_request(self, channel: paramiko.Channel, name: str) -> bool:
        if self._sftp is not None:
            _in_background(self._sftp, channel, name.encode())
        return self._sftp is not None


class Server:
    """An SSH server in this process; it closes with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key: Any = paramiko.RSAKey.generate(2048)
        self.say: TextSink = lambda channel, command: channel.close()
        self.sftp: TextSink | None = None
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
                transport.start_server(threading.Event(), _Odd(lambda *a: self.say(*a), self.sftp))
        except OSError:
            pass

    def log_in(self) -> Shell:
        settings = Connection(
            identity=str(self._identity), known_hosts=str(self.folder / "known"), accept_new_host_key=True
        )
        address = f"somebody@{LOOPBACK}:{self._listener.getsockname()[1]}"
        return open_shell(address, settings, board="b", base=self.folder, timeout=5)

    def close(self) -> None:
        self._listener.close()
        for transport in self.transports:
            transport.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.close()


def _in_background(call: Callable[..., None], *arguments: object) -> None:
    def work() -> None:
        time.sleep(0.05)  # paramiko's own answer to the request comes first
        with contextlib.suppress(OSError, EOFError):
            call(*arguments)

    threading.Thread(target=work, daemon=True).start()


class _NoKey(paramiko.RSAKey):
    """Says that it is an RSA key, of numbers that no key has."""

    def asbytes(self) -> bytes:
        message = paramiko.Message()
        message.add_string("ssh-rsa")
        message.add_mpint(0)
        message.add_mpint(0)
        return message.asbytes()


def test_a_host_key_that_is_none(server: Server) -> None:
    server.key = _NoKey(key=server.key.key)
    with pytest.raises(BoardError, match="does not go on with SSH"):
        server.log_in()


def test_a_message_that_is_no_text(server: Server) -> None:
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
    """The far side lives, answers signs of life, and never says that it did what it was asked for."""
    send = transport._send_user_message
    transport._send_user_message = lambda message: None if message.asbytes()[0] == 99 else send(message)


def test_a_command_of_which_nobody_says_that_it_began(server: Server) -> None:
    server.say = lambda channel, command: None
    shell, start = server.log_in(), time.monotonic()
    _say_nothing_of_success(server.transports[-1])
    with pytest.raises(BoardError, match="did not answer within 2 s"):
        shell.run(["true"], timeout=2)
    assert time.monotonic() - start < 15


def test_an_sftp_server_of_which_nobody_says_that_it_began(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_PATIENCE_S", 2.0)
    server.sftp = lambda channel, name: None
    shell, start = server.log_in(), time.monotonic()
    _say_nothing_of_success(server.transports[-1])
    with pytest.raises(BoardError):
        shell.get("/x", tmp_path / "back", 100)
    assert time.monotonic() - start < 15


def test_a_channel_closes_on_a_connection_that_has_ended(server: Server) -> None:
    """Its transport may be yet to notice: paramiko raises EOFError then, in whatever thread closes the channel."""

    def nobody(message: object) -> None:
        raise EOFError

    with server.log_in() as shell:
        channel = shell.transport.open_session()
        shell.transport.packetizer.send_message = nobody
        channel.close()
        assert channel.closed
        with pytest.raises(EOFError):
            shell.transport.open_session(timeout=5)


def _packets(channel: paramiko.Channel) -> Iterator[tuple[int, int]]:
    """The kind and the number of each request of SFTP's."""
    while True:
        data = b""
        while len(data) < 4 or len(data) < 4 + struct.unpack(">I", data[:4])[0]:
            piece = channel.recv(4 if len(data) < 4 else 4 + struct.unpack(">I", data[:4])[0] - len(data))
            if not piece:
                return
            data += piece
        yield data[4], struct.unpack(">I", data[5:9])[0]


def _reply(channel: paramiko.Channel, kind: int, *parts: bytes) -> None:
    body = bytes([kind]) + b"".join(parts)
    channel.sendall(struct.pack(">I", len(body)) + body)


def _string(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def _a_file(size: int, data: Callable[[paramiko.Channel, int], None]) -> TextSink:
    """An SFTP server whose every file says that it has so many bytes."""

    def serve(channel: paramiko.Channel, _: bytes) -> None:
        for kind, number in _packets(channel):
            if kind == 1:
                _reply(channel, 2, struct.pack(">I", 3))
            elif kind == 3:
                _reply(channel, 102, struct.pack(">I", number), _string(b"h"))
            elif kind == 8:
                _reply(channel, 105, struct.pack(">IIQ", number, 1, size))
            elif kind == 5:
                data(channel, number)
            else:
                _reply(channel, 101, struct.pack(">II", number, 0), _string(b""), _string(b""))

    return serve


def _ones(channel: paramiko.Channel, number: int) -> None:
    _reply(channel, 103, struct.pack(">I", number), _string(b"1" * 32_768))


def _never_asked_for(channel: paramiko.Channel, number: int) -> None:
    while True:
        _reply(channel, 103, struct.pack(">I", number + 1_000_000), _string(b"1" * 32_768))


def _no_text(channel: paramiko.Channel, number: int) -> None:
    _reply(channel, 101, struct.pack(">II", number, 4), _string(b"\xff\xfe"), _string(b"\xff"))


@pytest.mark.parametrize(
    ("sftp", "why"),
    [
        (_a_file(1 << 62, _ones), "at most 100 are expected"),
        (_a_file(0, _ones), "more than 100 bytes came"),
        (_a_file(100, _no_text), "make no sense"),
        (_a_file(100, _never_asked_for), "broke during"),
        (lambda channel, _: _reply(channel, 2), "cannot read"),
        (lambda channel, _: channel.sendall(b"\xff" * 1000), "cannot read"),
    ],
    ids=["huge", "endless", "no text", "never asked for", "no version", "garbage"],
)
def test_a_file_that_is_larger_than_it_may_be_or_none(
    server: Server, tmp_path: Path, sftp: TextSink, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_PATIENCE_S", 3.0)
    server.sftp = sftp
    server.say = lambda channel, command: channel.close()
    shell, start = server.log_in(), time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BoardError, match=why):
        shell.get("/x", tmp_path / "back", 100)
    assert time.monotonic() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10
    assert not list(tmp_path.glob("back*"))


def _begun(*pieces: bytes, endless: bool = False) -> TextSink:
    def say(channel: paramiko.Channel, _: bytes) -> None:
        channel.sendall(b"hil: the command begins\n")
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


@pytest.mark.parametrize("say", [_begun(b"1" * 1000, endless=True), _greeting], ids=["content", "greeting"])
def test_a_command_that_writes_on_and_on_in_place_of_a_file(server: Server, tmp_path: Path, say: TextSink) -> None:
    server.say = say
    shell = server.log_in()
    with pytest.raises(BoardError, match="it wrote more than it may"):
        shell.get("/x", tmp_path / "back", 100)
    (tmp_path / "data").write_bytes(b"x")
    with pytest.raises(BoardError, match="it wrote more than it may"):
        shell.put(tmp_path / "data", "/x")
    assert not list(tmp_path.glob("back*"))


@pytest.mark.parametrize("port", ["²", "0", "65536", "9" * 3000, "-1", ""])
def test_a_helper_that_tells_no_port(server: Server, port: str) -> None:
    server.say = _begun(port.encode() + b"\n")
    shell = server.log_in()
    with pytest.raises(NoRelay, match="no port"):
        TcpRelay(shell.transport, "python3", "/x")


@pytest.mark.parametrize("say", [_begun(b"1" * 1000, endless=True), _greeting], ids=["line", "greeting"])
def test_a_helper_whose_first_line_never_ends(server: Server, say: TextSink) -> None:
    server.say = say
    shell = server.log_in()
    with pytest.raises(paramiko.SSHException, match="it wrote more than it may"):
        TcpRelay(shell.transport, "python3", "/x")


def test_a_board_that_talks_on_and_on_beside_a_tunnel_fills_no_disk(
    tmp_path: Path, log_in: Callable[..., Shell]
) -> None:
    with running_sshd(
        tmp_path / "loud", "ForceCommand head -c 20000000 /dev/zero | tee /dev/stderr; exec sleep 60"
    ) as loud:
        shell = log_in(server=loud)
        one = tunnel.open_tunnel(shell, str(tmp_path / "far.sock"), openssh_client=True)
        try:
            folder = Path(one.address.removeprefix("unix:")).parent
            deadline = time.monotonic() + 5
            while one.alive() and time.monotonic() < deadline:
                time.sleep(0.1)
            assert sum(path.stat().st_size for path in folder.glob("*") if path.is_file()) < 5 << 20
        finally:
            one.close()

"""Client for OpenSSH's control socket: sessions and forwards of a logged-in ``ssh``.

Implements OpenSSH's multiplexing protocol, version 4 (PROTOCOL.mux). The ssh process receives socket pairs as a
session's stdin, stdout and stderr, so a session does not need a local process.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from hil.controller.devices.ssh.transport import SessionRefused

_VERSION = 4
_HELLO = 0x00000001
_NEW_SESSION, _OPEN_FORWARD, _CLOSE_FORWARD = 0x10000002, 0x10000006, 0x10000007
_OK, _EXIT, _OPENED = 0x80000001, 0x80000004, 0x80000006
_REFUSALS = (0x80000002, 0x80000003)
_LOCAL = 1
# Port number that stands for a Unix socket, and character code that disables the escape character.
_NONE = 0xFFFFFFFF - 1
_NO_ESCAPE = 0xFFFFFFFF
_ANSWER_SECONDS = 20.0
_MAX_MESSAGE_BYTES = 1 << 16
_LOOPBACK = "127.0.0.1"


class MuxSession:
    """Running command on the board; see :class:`hil.controller.devices.ssh.transport.CommandSession`."""

    def __init__(self, control: _Control, stdin: socket.socket, stdout: socket.socket, stderr: socket.socket) -> None:
        self._control = control
        self._stdin, self._stdout, self._stderr = stdin, stdout, stderr
        self.settimeout, self.recv, self.recv_stderr = stdout.settimeout, stdout.recv, stderr.recv
        self.sendall = stdin.sendall

    def shutdown_write(self) -> None:
        """Close the command's stdin."""
        self._stdin.shutdown(socket.SHUT_WR)

    def wait(self, seconds: float) -> int:
        """Return the exit code. Raises EOFError without an exit code, and TimeoutError."""
        kind, body = self._control.receive(seconds)
        if kind != _EXIT or len(body) != 8:
            raise EOFError("the command ended without an exit code")
        return int.from_bytes(body[4:], "big")

    def close(self) -> None:
        """Disconnect from the command. The ssh process then closes the other side."""
        for one in (self._stdin, self._stdout, self._stderr, self._control):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


class _Control(socket.socket):
    """Connection to the control socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__(socket.AF_UNIX)
        try:
            self.settimeout(timeout)
            self.connect(str(path))
            self.send_message(_HELLO, _number(_VERSION))
            if self.receive(timeout) != (_HELLO, _number(_VERSION)):
                raise OSError("unsupported protocol version of ssh's control socket")
        except BaseException:
            self.close()
            raise

    def send_message(self, kind: int, body: bytes) -> None:
        self.sendall(_encode_text(_number(kind) + body))

    def receive(self, timeout: float) -> tuple[int, bytes]:
        """Return a message's kind and body. Raises EOFError or TimeoutError."""
        self.settimeout(timeout)
        size = int.from_bytes(self._read(4), "big")
        if not 4 <= size <= _MAX_MESSAGE_BYTES:
            raise OSError("invalid message on ssh's control socket")
        message = self._read(size)
        return int.from_bytes(message[:4], "big"), message[4:]

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                piece = self.recv(size - len(data))
            except ConnectionError:
                piece = b""
            if not piece:
                raise EOFError("ssh exited")
            data += piece
        return data


def check(path: Path) -> None:
    """Test the connection to a control socket. Raises OSError or EOFError if no ssh process serves the socket."""
    _Control(path, _ANSWER_SECONDS).close()


def open_session(path: Path, command: str, timeout: float) -> MuxSession:
    """Run a command line in the login shell. Raises SessionRefused, EOFError, TimeoutError or OSError."""
    with contextlib.ExitStack() as opening:
        control = opening.enter_context(_Control(path, timeout))
        pairs = [socket.socketpair() for _ in range(3)]
        for ours, theirs in pairs:
            opening.callback(ours.close)
            opening.callback(theirs.close)
        # no terminal, no X11, no agent, no subsystem
        body = [
            _number(0),
            _encode_text(b""),
            *[_number(0)] * 4,
            _number(_NO_ESCAPE),
            _encode_text(b""),
            _encode_text(command.encode()),
        ]
        control.send_message(_NEW_SESSION, b"".join(body))
        for _, theirs in pairs:
            socket.send_fds(control, [b"\0"], [theirs.fileno()])
            theirs.close()
        kind, answer = control.receive(timeout)
        if kind in _REFUSALS:
            raise SessionRefused(_parse_reason(answer))
        if kind != _OPENED:
            raise EOFError("ssh did not open a session")
        opening.pop_all()
        return MuxSession(control, *(ours for ours, _ in pairs))


def open_forward(path: Path, local: Path, remote: str | int) -> Callable[[], None]:
    """Forward a local Unix socket to a path or loopback port of the board. Return a function that ends the forward.

    Raises OSError or EOFError if the forward fails.
    """
    host, port = (remote, _NONE) if isinstance(remote, str) else (_LOOPBACK, remote)
    ends = _encode_text(str(local).encode()) + _number(_NONE) + _encode_text(host.encode()) + _number(port)

    def ask(kind: int) -> tuple[int, bytes]:
        with _Control(path, _ANSWER_SECONDS) as control:
            control.send_message(kind, _number(0) + _number(_LOCAL) + ends)
            return control.receive(_ANSWER_SECONDS)

    def close() -> None:
        with contextlib.suppress(OSError, EOFError):
            ask(_CLOSE_FORWARD)
        local.unlink(missing_ok=True)

    kind, answer = ask(_OPEN_FORWARD)
    if kind != _OK:
        raise OSError(f"ssh did not open a tunnel: {_parse_reason(answer)}")
    return close


def _parse_reason(answer: bytes) -> str:
    """Return the text of a refusal, which follows the request id and the length of the text."""
    return answer[8:].decode(errors="replace").strip() or "no reason given"


def _number(value: int) -> bytes:
    return struct.pack(">I", value)


def _encode_text(data: bytes) -> bytes:
    return _number(len(data)) + data

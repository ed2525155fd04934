"""SSH transport with paramiko, for machines without ``ssh``.

Adds to paramiko's transport: fast ciphers, keep-alives, exit codes of signals, and channels to Unix sockets.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import fabric
import paramiko
from paramiko.auth_handler import AuthHandler
from paramiko.common import MSG_CHANNEL_REQUEST, cMSG_CHANNEL_CLOSE, cMSG_CHANNEL_EOF, cMSG_CHANNEL_OPEN

from hil.controller.devices.guard import Guard
from hil.controller.devices.ssh.transport import ALIVE_COUNT, ALIVE_INTERVAL_SECONDS, FAST_CIPHERS, SessionRefused
from hil.core.processes import wait_or_kill
from hil.protocol.local_socket import LocalSocket, NotCarried

_STREAMLOCAL = "direct-streamlocal@openssh.com"
# Timeout for the end of a terminated ProxyCommand.
END_SECONDS = 2.0
_SILENCE_SECONDS = ALIVE_INTERVAL_SECONDS * ALIVE_COUNT
_OPEN_SECONDS = 20.0
_PIECE = 1 << 20
_LOOPBACK = "127.0.0.1"
# Exit code of a command that an unknown signal ended.
NAMELESS_SIGNAL = 128


_TCP = (socket.AF_INET, socket.AF_INET6)
# Linux option for immediate acknowledgements. Before the first command on a connection, sshd sends a second small
# packet only after hil's kernel acknowledges the first packet. The kernel delays this acknowledgement by 40 ms. The
# kernel resets the option, so set it after every read.
_QUICKACK = getattr(socket, "TCP_QUICKACK", 0)


class _Listened:
    """Socket wrapper that records received data and acknowledges it immediately."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._acknowledges = bool(_QUICKACK) and isinstance(sock, socket.socket) and sock.family in _TCP
        self.heard = True

    def recv(self, size: int) -> bytes:
        data: bytes = self._sock.recv(size)
        self.heard = True
        if self._acknowledges:
            self._sock.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def _handle_request(channel: Any, message: paramiko.Message) -> None:
    """Handle the end of a command by a signal, which paramiko ignores. Pass other requests to paramiko."""
    start = message.packet.tell()
    if message.get_text() == "exit-signal":
        message.get_boolean()
        number = getattr(signal, f"SIG{message.get_text()}", 0)
        channel.exit_status = NAMELESS_SIGNAL + number
        channel.status_event.set()
    else:
        message.packet.seek(start)
        channel._handle_request(message)


class _Authentication(AuthHandler):
    """Authentication attempt. A failed signature ends only this attempt, so that the next key can be tried."""

    transport: TunedTransport
    auth_event: threading.Event

    def _parse_service_accept(self, message: paramiko.Message) -> None:
        try:
            super()._parse_service_accept(message)  # type: ignore[misc]  # paramiko's types leave it out
        except (paramiko.SSHException, OSError, ValueError) as error:
            # The request was not sent to the server, so do not wait for a response.
            self.transport.saved_exception = error
            self.auth_event.set()


class TunedTransport(paramiko.Transport):
    """Transport that sends small packets immediately, prefers hardware ciphers, and closes silent connections.

    The class overrides methods that paramiko's type stubs omit, and passes a wrapped socket. The type ignores are
    therefore needed.
    """

    _channel_handler_table: ClassVar[dict[int, Any]] = {
        **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]
        MSG_CHANNEL_REQUEST: _handle_request,
    }

    def __init__(self, sock: Any, **options: Any) -> None:
        # Nagle's algorithm would delay the second of two small sends by 40 ms.
        if isinstance(sock, socket.socket) and sock.family in _TCP:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._listened = _Listened(sock)
        self._opening = threading.Lock()
        self._path = ""
        super().__init__(self._listened, **options)  # type: ignore[arg-type]
        security = self.get_security_options()
        security.ciphers = (*FAST_CIPHERS, *(name for name in security.ciphers if "gcm" not in name))

    @property
    def saved_exception(self) -> Exception | None:
        """Error that ended the transport's thread. paramiko raises this error in threads that wait for the server."""
        return self._saved

    @saved_exception.setter
    def saved_exception(self, error: Exception | None) -> None:
        # Wrap other exceptions: an invalid message, such as a bad key or invalid UTF-8, can raise any exception.
        if error is not None and not isinstance(error, (paramiko.SSHException, EOFError, OSError)):
            error = paramiko.SSHException(f"invalid message from the server: {error}")
        self._saved = error

    def auth_publickey(self, username: str, key: paramiko.PKey, event: threading.Event | None = None) -> list[str]:
        """Try to log in with a key. Return the methods that the server still requires."""
        self.auth_handler = handler = _Authentication(self)
        done = event or threading.Event()
        handler.auth_publickey(username, key, done)
        return handler.wait_for_response(done)

    def watch(self, give_up: Callable[[], None]) -> None:
        """Start to send keep-alives, and call ``give_up`` after 12 s without a response.

        ``give_up`` must close the connection, so that all waiting threads fail.
        """
        for work in (self._ask, lambda: self._judge(give_up)):
            threading.Thread(target=work, daemon=True, name="hil-ssh-alive").start()

    def open_streamlocal(self, path: str, timeout: float) -> paramiko.Channel:
        """Open a channel to a Unix socket on the server. Raises paramiko.SSHException if it is missing or forbidden."""
        with self._opening:
            self._path = path
            return self.open_channel(_STREAMLOCAL, timeout=timeout)

    def _send_user_message(self, data: paramiko.Message) -> None:
        # paramiko does not support this channel type, so append the required fields to the opening message.
        if bytes(data.packet.getbuffer()[: len(_OPEN_STREAMLOCAL)]) == _OPEN_STREAMLOCAL:
            data.add_string(self._path)
            data.add_string("")
            data.add_int(0)
        try:
            super()._send_user_message(data)  # type: ignore[misc]
        except EOFError:
            # Ignore the error if paramiko closes a channel of a closed connection.
            if data.asbytes()[:1] not in _ENDS_OF_A_CHANNEL:
                raise

    def _ask(self) -> None:
        pause = threading.Event()
        with contextlib.suppress(EOFError, OSError, paramiko.SSHException):
            while self.is_active():
                self.global_request("keepalive@openssh.com", wait=True)
                pause.wait(ALIVE_INTERVAL_SECONDS)

    def _judge(self, give_up: Callable[[], None]) -> None:
        # Count ticks instead of clock time, so that a suspended process does not time out after it resumes.
        pause = threading.Event()
        silent = 0
        while self.is_active() and silent < _SILENCE_SECONDS:
            pause.wait(1.0)
            silent = 0 if self._listened.heard else silent + 1
            self._listened.heard = False
        if self.is_active():
            give_up()


def _encode_opening() -> bytes:
    message = paramiko.Message()
    message.add_byte(cMSG_CHANNEL_OPEN)
    message.add_string(_STREAMLOCAL)
    return message.asbytes()


_OPEN_STREAMLOCAL = _encode_opening()
_ENDS_OF_A_CHANNEL = (cMSG_CHANNEL_EOF, cMSG_CHANNEL_CLOSE)


@dataclass(frozen=True)
class Hop:
    """Logged-in machine: the board or a jump host."""

    connection: fabric.Connection
    proxy: subprocess.Popen[bytes] | None = None

    @property
    def transport(self) -> TunedTransport:
        """Open transport of the hop."""
        transport = self.connection.transport
        assert isinstance(transport, TunedTransport)
        return transport

    def close(self) -> None:
        """Log out."""
        self.connection.client.close()
        if self.proxy:
            self.proxy.terminate()
            wait_or_kill(self.proxy, END_SECONDS)


def close_hops(hops: Sequence[Hop]) -> None:
    """Log out from all hops, the nearest first, so that waits for later hops fail."""
    for hop in hops:
        hop.close()


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    """Translate paramiko's errors to Python's built-in errors."""
    try:
        yield
    except paramiko.ChannelException as error:
        raise SessionRefused(error.text) from error
    except paramiko.SSHException as error:
        if "Timeout" in str(error):
            raise TimeoutError(str(error)) from error
        raise EOFError(str(error)) from error


class ChannelSession:
    """Running command on the board; see :class:`hil.controller.devices.ssh.transport.CommandSession`."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self.settimeout, self.recv, self.recv_stderr = channel.settimeout, channel.recv, channel.recv_stderr
        self.sendall, self.shutdown_write, self.close = channel.sendall, channel.shutdown_write, channel.close

    def wait(self, seconds: float) -> int:
        """Return the exit code. Raises EOFError without an exit code, and TimeoutError."""
        if not self._channel.status_event.wait(seconds):
            raise TimeoutError
        if self._channel.exit_status == -1:
            raise EOFError("the command ended without an exit code")
        return self._channel.exit_status


class ParamikoLogin:
    """Login with paramiko; see :class:`hil.controller.devices.ssh.transport.Transport`."""

    def __init__(self, hops: Sequence[Hop]) -> None:
        self._hops = hops
        self._transport = hops[-1].transport
        self.user: str = hops[-1].connection.user
        self.port: int = hops[-1].connection.port
        self.fingerprint: str = self._transport.get_remote_server_key().fingerprint
        self._transport.watch(self.close)

    def start(self, command: str, timeout: float) -> ChannelSession:
        """Run a command line in the login shell."""
        with _translate_errors():
            channel = self._transport.open_session(timeout=timeout)
            guard = Guard(channel.close)  # paramiko has no timeout here
            guard.set_timeout(timeout)
            try:
                channel.exec_command(command)
            except (OSError, paramiko.SSHException):
                if guard.expired:
                    raise TimeoutError("the command did not start in time") from None
                raise
            finally:
                guard.close()
            return ChannelSession(channel)

    def refusal(self, remote: str | int) -> str:
        """Return the server's reason for refusing a connection to a board's socket; "" if accepted."""
        try:
            with _translate_errors():
                self._connect(remote).close()
        except SessionRefused as error:
            return str(error)
        return ""

    def forward(self, local: Path, remote: str | int) -> _ChannelForward:
        """Forward a local Unix socket to a socket on the board."""
        return _ChannelForward(local, remote, self._connect, self.has_ended)

    def interactive(self, command: str) -> int:
        """Run a command line or the login shell on the terminal. Return the exit code."""
        with _translate_errors():
            code: int = self._hops[-1].connection.run(command or 'exec "$SHELL" -l', pty=True, warn=True).exited
            return code

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Return whether the connection has ended or ends within ``within_s`` seconds."""
        if within_s:
            self._transport.join(within_s)
        return not self._transport.is_active()

    def close(self) -> None:
        """Log out."""
        close_hops(self._hops)

    def _connect(self, remote: str | int) -> paramiko.Channel:
        if isinstance(remote, str):
            return self._transport.open_streamlocal(remote, _OPEN_SECONDS)
        return self._transport.open_channel("direct-tcpip", (_LOOPBACK, remote), (_LOOPBACK, 0), timeout=_OPEN_SECONDS)


class _ChannelForward:
    """Forward from a local socket to a socket on the board, over paramiko channels."""

    def __init__(
        self,
        local: Path,
        remote: str | int,
        connect: Callable[[str | int], paramiko.Channel],
        ended: Callable[[], bool],
    ) -> None:
        self._remote, self._connect, self._ended = remote, connect, ended
        self._socket = LocalSocket(local, self._relay_connection, "hil-ssh-tunnel")
        self.log, self.close = self._socket.log, self._socket.close

    def alive(self) -> bool:
        """Return whether the connection is open."""
        return not self._ended() and self._socket.alive()

    def _relay_connection(self, near: socket.socket) -> None:
        try:
            with contextlib.closing(self._connect(self._remote)) as far:
                back = threading.Thread(target=_copy_back, args=(far, near), daemon=True)
                back.start()
                with contextlib.suppress(OSError):
                    while piece := near.recv(_PIECE):
                        far.sendall(piece)
                    far.shutdown_write()
                back.join()
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise NotCarried(f"{self._remote}: {error}") from error


def _copy_back(far: paramiko.Channel, near: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := far.recv(_PIECE):
            near.sendall(piece)
        near.shutdown(socket.SHUT_RDWR if far.closed else socket.SHUT_WR)

"""A machine that we are logged in to, and paramiko's transport with what a board needs: speed, a sign of life, how a
signal ended a command, Unix sockets."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import fabric
import paramiko
from paramiko.auth_strategy import AuthSource, InMemoryPrivateKey, OnDiskPrivateKey
from paramiko.common import MSG_CHANNEL_REQUEST, cMSG_CHANNEL_CLOSE, cMSG_CHANNEL_EOF, cMSG_CHANNEL_OPEN

from hil.core.processes import wait_or_kill

_STREAMLOCAL = "direct-streamlocal@openssh.com"
ASK_EVERY_S = 3.0
# For a ProxyCommand that was asked to end.
END_S = 2.0
# Seconds without a byte from the far side after which it is given up. A link that is cut for 5 s is not.
SILENCE_S = 12
#: The code of a command that a signal without a name of its own ended.
NAMELESS_SIGNAL = 128


_TCP = (socket.AF_INET, socket.AF_INET6)
# Linux's acknowledgement at once. Until sshd has run a command on a connection, its second small piece waits for that
# of the first, which would come after 40 ms. The kernel forgets the wish again, so it is told with every piece.
_QUICKACK = getattr(socket, "TCP_QUICKACK", 0)


class _Listened:
    """A socket that remembers whether something was received, and acknowledges it at once."""

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
    """paramiko's own, and the end of a command by a signal, which paramiko drops."""
    start = message.packet.tell()
    if message.get_text() == "exit-signal":
        message.get_boolean()
        number = getattr(signal, f"SIG{message.get_text()}", 0)
        channel.exit_status = NAMELESS_SIGNAL + number
        channel.status_event.set()
    else:
        message.packet.seek(start)
        channel._handle_request(message)


class Transport(paramiko.Transport):
    """A transport that sends small pieces at once, prefers the ciphers that machines do in hardware, and gives up a
    far side that is silent."""

    _preferred_ciphers = (
        "aes128-gcm@openssh.com",
        "aes256-gcm@openssh.com",
        *(name for name in paramiko.Transport._preferred_ciphers if "gcm" not in name),  # type: ignore[attr-defined]
    )
    _channel_handler_table: ClassVar[dict[int, Any]] = {
        **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]
        MSG_CHANNEL_REQUEST: _handle_request,
    }

    def __init__(self, sock: Any, **options: Any) -> None:
        # Two small sends in a row would wait for each other 40 ms.
        if isinstance(sock, socket.socket) and sock.family in _TCP:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._listened = _Listened(sock)
        self._opening = threading.Lock()
        self._path = ""
        super().__init__(self._listened, **options)  # type: ignore[arg-type]

    @property
    def saved_exception(self) -> Exception | None:
        """What the transport's thread ended with; paramiko raises it where somebody waits for the far side."""
        return self._saved

    @saved_exception.setter
    def saved_exception(self, error: Exception | None) -> None:
        # A far side's nonsense (a key that is none, a text that is no UTF-8) raises whatever it raises.
        if error is not None and not isinstance(error, (paramiko.SSHException, EOFError, OSError)):
            error = paramiko.SSHException(f"the far side's message makes no sense: {error}")
        self._saved = error

    def watch(self, give_up: Callable[[], None]) -> None:
        """From now on ask the far side for a sign of life, and call ``give_up`` once there was none for 12 s.

        Whatever waits for the far side then ends, with an error.
        """
        for work in (self._ask, lambda: self._judge(give_up)):
            threading.Thread(target=work, daemon=True, name="hil-ssh-alive").start()

    def open_streamlocal(self, path: str, timeout: float) -> paramiko.Channel:
        """A channel to a Unix socket on the far side; paramiko.SSHException where there is none, or none is allowed."""
        with self._opening:
            self._path = path
            return self.open_channel(_STREAMLOCAL, timeout=timeout)

    def _send_user_message(self, data: paramiko.Message) -> None:
        # paramiko knows no such channel: what its kind needs is added to the message that opens it.
        if bytes(data.packet.getbuffer()[: len(_OPEN_STREAMLOCAL)]) == _OPEN_STREAMLOCAL:
            data.add_string(self._path)
            data.add_string("")
            data.add_int(0)
        try:
            super()._send_user_message(data)  # type: ignore[misc]
        except EOFError:
            # On a connection that has ended nobody has to be told that a channel is closed.
            if data.asbytes()[:1] not in _ENDS_OF_A_CHANNEL:
                raise

    def _ask(self) -> None:
        pause = threading.Event()
        with contextlib.suppress(EOFError, OSError, paramiko.SSHException):
            while self.is_active():
                self.global_request("keepalive@openssh.com", wait=True)
                pause.wait(ASK_EVERY_S)

    def _judge(self, give_up: Callable[[], None]) -> None:
        # Counts its own ticks, not the clock's seconds: after this process was stopped for a while it begins anew.
        pause = threading.Event()
        silent = 0
        while self.is_active() and silent < SILENCE_S:
            pause.wait(1.0)
            silent = 0 if self._listened.heard else silent + 1
            self._listened.heard = False
        if self.is_active():
            give_up()


def _opening_bytes() -> bytes:
    message = paramiko.Message()
    message.add_byte(cMSG_CHANNEL_OPEN)
    message.add_string(_STREAMLOCAL)
    return message.asbytes()


_OPEN_STREAMLOCAL = _opening_bytes()
_ENDS_OF_A_CHANNEL = (cMSG_CHANNEL_EOF, cMSG_CHANNEL_CLOSE)


class AgentKey(InMemoryPrivateKey):
    """A key that the ssh agent holds."""

    def __str__(self) -> str:
        return f"the agent's key {self.pkey.fingerprint}"


class FileKey(OnDiskPrivateKey):
    """A key in a file."""

    def __init__(self, username: str, path: Path, pkey: paramiko.PKey, *, plain: bool) -> None:
        super().__init__(username, "python-config", path, pkey)
        # Whether ssh's own client takes it as it is: without a passphrase, and nobody else can read it.
        self.plain = plain

    def __str__(self) -> str:
        return f"the key {self.path}"


@dataclass(frozen=True)
class Hop:
    """A machine that we are logged in to: the board, or one on the way to it."""

    connection: fabric.Connection
    source: AuthSource
    host_key: paramiko.PKey
    proxy_command: str = ""  # the command that leads there in place of a TCP connection, or ""
    proxy: subprocess.Popen[bytes] | None = None

    @property
    def transport(self) -> Transport:
        """The open transport."""
        transport = self.connection.transport
        assert isinstance(transport, Transport)
        return transport

    def close(self) -> None:
        """Log out."""
        self.connection.client.close()
        if self.proxy:
            self.proxy.terminate()
            wait_or_kill(self.proxy, END_S)


def close_hops(hops: Sequence[Hop]) -> None:
    """Log out everywhere, the nearest machine first: what waits for a farther one then ends."""
    for hop in hops:
        hop.close()

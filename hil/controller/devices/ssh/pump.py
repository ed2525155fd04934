"""A tunnel through our own connection, where no ``ssh`` can make one."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import paramiko

from hil.controller.devices.local_socket import LocalSocket, NotCarried
from hil.controller.devices.ssh.transport import Transport

_OPEN_S = 10.0
_PIECE = 1 << 20
# A channel to the far side, and what comes from it.
Carried = tuple[paramiko.Channel, Iterator[bytes]]


class FarSide(Protocol):
    """What leads to a socket on a board."""

    def open(self) -> Carried:
        """A connection to it."""
        ...

    def alive(self) -> bool:
        """Whether it still leads there."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Streamlocal:
    """A Unix socket that sshd forwards."""

    def __init__(self, transport: Transport, remote: str) -> None:
        self._open: Callable[[], paramiko.Channel] = lambda: transport.open_streamlocal(remote, _OPEN_S)

    def open(self) -> Carried:
        """A connection to it."""
        channel = self._open()
        return channel, iter(lambda: channel.recv(_PIECE), b"")

    def alive(self) -> bool:
        """As long as the connection is up."""
        return True

    def close(self) -> None:
        """There is nothing to end."""


class Pump:
    """Listens on a local socket, and carries what comes in to a socket on the far side and back.

    Args:
        transport: an open connection.
        local: the socket to make here.
        remote: the socket there.
        far: leads to it.
    """

    def __init__(self, transport: Transport, local: Path, remote: str, far: FarSide) -> None:
        self._transport = transport
        self._remote = remote
        self._far = far
        self._socket = LocalSocket(local, self._carry, "hil-ssh-tunnel")

    def alive(self) -> bool:
        """Whether the connection is up."""
        return self._transport.is_active() and self._socket.alive() and self._far.alive()

    def log(self) -> str:
        """Why connections were not carried."""
        return self._socket.log()

    def close(self) -> None:
        """End it and all that it carries."""
        self._socket.close()
        self._far.close()

    def _carry(self, near: socket.socket) -> None:
        try:
            channel, pieces = self._far.open()
            with contextlib.closing(channel) as far:
                back = threading.Thread(target=_copy_back, args=(far, pieces, near), daemon=True)
                back.start()
                with contextlib.suppress(OSError):
                    while piece := near.recv(_PIECE):
                        far.sendall(piece)
                    far.shutdown_write()
                back.join()
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise NotCarried(f"{self._remote}: {error}") from error


def _copy_back(far: paramiko.Channel, pieces: Iterator[bytes], near: socket.socket) -> None:
    with contextlib.suppress(OSError):
        for piece in pieces:
            near.sendall(piece)
        near.shutdown(socket.SHUT_RDWR if far.closed else socket.SHUT_WR)

"""A tunnel through our own connection, where no ``ssh`` can make one."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import paramiko

from hil.controller.local_socket import LocalSocket, NotCarried
from hil.controller.ssh.transport import Transport

_OPEN_S = 10.0
_PIECE = 1 << 20


class Pump:
    """Listens on a local socket, and carries what comes in to a socket on the far side and back.

    Args:
        transport: an open connection.
        local: the socket to make here.
        remote: the socket there.
    """

    def __init__(self, transport: Transport, local: Path, remote: str) -> None:
        self._transport = transport
        self._remote = remote
        self._socket = LocalSocket(local, self._carry, "hil-ssh-tunnel")

    def alive(self) -> bool:
        """Whether the connection is up."""
        return self._transport.is_active() and self._socket.alive()

    def log(self) -> str:
        """Why connections were not carried."""
        return self._socket.log()

    def close(self) -> None:
        """End it and all that it carries."""
        self._socket.close()

    def _carry(self, near: socket.socket) -> None:
        try:
            with contextlib.closing(self._transport.open_streamlocal(self._remote, _OPEN_S)) as far:
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

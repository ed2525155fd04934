"""A tunnel through our own connection, where no ``ssh`` can make one."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import paramiko

from hil.controller.ssh.transport import Transport

_OPEN_S = 10.0
_PIECE = 1 << 20
_LINES = 100


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
        self._said: list[str] = []
        self._open: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(local))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True, name="hil-ssh-tunnel").start()

    def alive(self) -> bool:
        """Whether the connection is up."""
        return self._transport.is_active() and self._listener.fileno() >= 0

    def log(self) -> str:
        """Why connections were not carried."""
        return "\n".join(self._said)

    def close(self) -> None:
        """End it and all that it carries."""
        for one in (self._listener, *list(self._open)):
            # A thread that waits in it wakes up.
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        self._open.add(near)
        try:
            with near, contextlib.closing(self._transport.open_streamlocal(self._remote, _OPEN_S)) as far:
                back = threading.Thread(target=_copy_back, args=(far, near), daemon=True)
                back.start()
                with contextlib.suppress(OSError):
                    while piece := near.recv(_PIECE):
                        far.sendall(piece)
                    far.shutdown_write()
                back.join()
        except (OSError, EOFError, paramiko.SSHException) as error:
            self._said = [*self._said, f"{self._remote}: {error}"][-_LINES:]
        finally:
            self._open.discard(near)


def _copy_back(far: paramiko.Channel, near: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := far.recv(_PIECE):
            near.sendall(piece)
        near.shutdown(socket.SHUT_RDWR if far.closed else socket.SHUT_WR)

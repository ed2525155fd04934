"""A Unix socket at which gRPC is served from the moment on that somebody speaks there.

hil itself calls an agent over data connections. gRPC, for others, takes an agent a quarter of its start to import and
15 MB of memory, and its server wakes up several times a second: an agent that nobody calls so has none of it.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hil.agent.admission import FIRST_MESSAGE_S, Room
from hil.errors import BoardBusy, UsageError
from hil.protocol.listening import private_socket, refuse_if_served
from hil.protocol.local_socket import LocalSocket, NotCarried

if TYPE_CHECKING:
    from hil.agent.grpc_server import GrpcServer

_SUFFIX = ".grpc"
_PIECE = 1 << 18


class GrpcOnDemand:
    """Listens at the path of a Unix socket that only its user can open.

    Args:
        silent: counts the connections that have said nothing yet.
        start: starts the server at an address, ``unix:PATH``.

    Raises:
        UsageError: it cannot listen there.
    """

    def __init__(self, path: str, silent: Room, start: Callable[[str], GrpcServer]) -> None:
        self._path = Path(path)
        self._silent = silent
        self._start = start
        self._lock = threading.Lock()
        self._closed = False
        self._failed = ""  # why there can be no server
        self._server: GrpcServer | None = None
        refuse_if_served(path)
        try:
            with private_socket(self._path):
                self._socket = LocalSocket(self._path, self._carry, "grpc-on-demand")
        except OSError as error:
            raise UsageError(f"cannot listen on unix:{path}: {error.strerror or error}") from error

    def close(self) -> None:
        """End all connections, and listen no more."""
        with self._lock:
            self._closed = True
        self._path.unlink(missing_ok=True)  # as long as it is ours
        if self._server is not None:
            self._server.close()
        self._socket.close()

    def _carry(self, near: socket.socket) -> None:
        near.settimeout(FIRST_MESSAGE_S)
        try:
            with self._silent.entered(_Caller(near)):
                begun = near.recv(1, socket.MSG_PEEK)
        except BoardBusy as error:
            raise NotCarried(error.message) from error
        if not begun:
            return  # who only looked whether anybody listens
        self._serve()
        near.settimeout(None)
        with socket.socket(socket.AF_UNIX) as far:
            far.connect(str(self._path))
            back = threading.Thread(target=_pass, args=(far, near), daemon=True, name="grpc-on-demand")
            back.start()
            _pass(near, far)
            back.join()

    def _serve(self) -> None:
        """Have the server run, at a path of its own that then takes the place of ours: who comes later comes to it."""
        with self._lock:
            if self._closed:
                raise NotCarried("the agent ends")
            if self._failed:
                raise NotCarried(self._failed)
            if self._server is not None:
                return
            own = self._path.with_name(f"{self._path.name}{_SUFFIX}")
            server = None
            try:
                server = self._start(f"unix:{own}")
                own.replace(self._path)
            except Exception as error:  # of a library that may be of the wrong version, too
                self._failed = f"{type(error).__name__}: {error}"
                print(f"gRPC cannot be served: {self._failed}", file=sys.stderr, flush=True)
                if server is not None:
                    server.close()
                raise NotCarried(self._failed) from error
            self._server = server


class _Caller:
    """A connection as a room knows calls: it can be ended."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def cancel(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


def _pass(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on until the source ends, and that end."""
    piece = memoryview(bytearray(_PIECE))
    try:
        while count := source.recv_into(piece):
            target.sendall(piece[:count])
        target.shutdown(socket.SHUT_WR)
    except OSError:
        # Neither way goes on alone.
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

"""Unix socket that starts the gRPC server when the first client sends data.

hil calls agents over data connections; gRPC serves other clients. Importing gRPC takes a quarter of the agent's
start-up time and 15 MB of memory, and the server wakes up multiple times a second. An agent without gRPC clients saves
this time and memory.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hil.agent.admission import FIRST_MESSAGE_SECONDS, Room
from hil.errors import BoardBusy, UsageError
from hil.protocol.listening import refuse_if_served, restrict_socket
from hil.protocol.local_socket import LocalSocket, NotCarried

if TYPE_CHECKING:
    from hil.agent.grpc_server import GrpcServer

_SUFFIX = ".grpc"
_PIECE = 1 << 18


class GrpcOnDemand:
    """Listener at a Unix socket that only its user can open.

    Args:
        path: path of the socket.
        silent: counts the connections that have not sent data yet.
        start: starts the gRPC server at an address, ``unix:PATH``.

    Raises:
        UsageError: listening failed.
    """

    def __init__(self, path: str, silent: Room, start: Callable[[str], GrpcServer]) -> None:
        self._path = Path(path)
        self._silent = silent
        self._start = start
        self._lock = threading.Lock()
        self._closed = False
        self._failed = ""  # error that prevents the server from starting
        self._server: GrpcServer | None = None
        refuse_if_served(path)
        try:
            with restrict_socket(self._path):
                self._socket = LocalSocket(self._path, self._relay_connection, "grpc-on-demand")
        except OSError as error:
            raise UsageError(f"cannot listen on unix:{path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Close all connections and stop listening."""
        with self._lock:
            self._closed = True
        self._path.unlink(missing_ok=True)  # before close: a later unlink could delete a new listener's file
        if self._server is not None:
            self._server.close()
        self._socket.close()

    def _relay_connection(self, near: socket.socket) -> None:
        near.settimeout(FIRST_MESSAGE_SECONDS)
        try:
            with self._silent.count_call(_Caller(near)):
                begun = near.recv(1, socket.MSG_PEEK)
        except BoardBusy as error:
            raise NotCarried(error.message) from error
        if not begun:
            return  # a probe that only checked for a listener
        self._serve()
        near.settimeout(None)
        with socket.socket(socket.AF_UNIX) as far:
            far.connect(str(self._path))
            back = threading.Thread(target=_pass, args=(far, near), daemon=True, name="grpc-on-demand")
            back.start()
            _pass(near, far)
            back.join()

    def _serve(self) -> None:
        """Start the server at a temporary path, then move the server's socket to this path.

        New clients then connect directly.
        """
        with self._lock:
            if self._closed:
                raise NotCarried("the agent is stopping")
            if self._failed:
                raise NotCarried(self._failed)
            if self._server is not None:
                return
            own = self._path.with_name(f"{self._path.name}{_SUFFIX}")
            server = None
            try:
                server = self._start(f"unix:{own}")
                own.replace(self._path)
            except Exception as error:  # the installed gRPC version may be incompatible
                self._failed = f"{type(error).__name__}: {error}"
                print(f"cannot serve gRPC: {self._failed}", file=sys.stderr, flush=True)
                if server is not None:
                    server.close()
                raise NotCarried(self._failed) from error
            self._server = server


class _Caller:
    """Adapter that makes a connection cancellable."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def cancel(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


def _pass(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes until the source ends, then shut down the target for writing."""
    piece = memoryview(bytearray(_PIECE))
    try:
        while count := source.recv_into(piece):
            target.sendall(piece[:count])
        target.shutdown(socket.SHUT_WR)
    except OSError:
        # Close both directions on an error.
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

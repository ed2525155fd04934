"""A Unix socket here that leads to the agent of a leased board: each connection is a stream of the farm's."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from hil.controller.devices.local_socket import LocalSocket, NotCarried
from hil.core.scratch import new_folder
from hil.errors import HilError
from hil.protocol import wire
from hil.protocol.v1 import farm_pb2 as pb

Dial = Callable[[Iterator[pb.Piece]], Any]

# What is left of a socket's path (at most 104 bytes on macOS) for the folder's parent.
_LONGEST_FOLDER = 60


class FarmTunnel:
    """A way to the agent, until it is closed.

    Args:
        dial: opens a stream to the agent that sends what is given, and gives what comes.

    Attributes:
        address: the local end, ``unix:PATH``, in a folder that nobody else can see into.
    """

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._folder = new_folder("hil-farm-", for_sockets=True)
        path = self._folder / "agent.sock"
        self.address = f"unix:{path}"
        self._socket = LocalSocket(path, self._carry, "hil-farm-tunnel")

    def log(self) -> str:
        """Why connections were not carried."""
        return self._socket.log()

    def close(self) -> None:
        """End it and all that it carries. Closing it again does nothing."""
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _carry(self, near: socket.socket) -> None:
        try:
            pass_on(self._dial(pieces_from(near)), near)
        except (grpc.RpcError, HilError) as error:
            raise NotCarried(str(error.details() if isinstance(error, grpc.Call) else error)) from error


def pieces_from(near: socket.socket) -> Iterator[pb.Piece]:
    """What comes from a socket, until its other end sends no more."""
    with contextlib.suppress(OSError):
        while data := near.recv(wire.CHUNK):
            yield pb.Piece(data=data)


def pass_on(far: Any, near: socket.socket) -> None:
    """Send a socket what comes from a stream of the farm's, until that ends; then both are at their end.

    Raises:
        grpc.RpcError: the stream broke.
        OSError: the socket did.
    """
    try:
        for piece in far:
            if piece.data:
                near.sendall(piece.data)
            else:  # nothing more comes from there
                with contextlib.suppress(OSError):  # whoever is here has gone first
                    near.shutdown(socket.SHUT_WR)
    finally:
        far.cancel()
        # The thread that reads from it must not be left there.
        with contextlib.suppress(OSError):
            near.shutdown(socket.SHUT_RDWR)

"""JSON messages with a length in front over a socket between the agent and its own processes."""

from __future__ import annotations

import json
import select
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<I")


class Closed(Exception):
    """The other side is gone."""


class Late(Exception):
    """The other side did not answer in time."""


def send(sock: socket.socket, message: Any, fds: list[int] | None = None) -> None:
    """Send one message, with descriptors if any.

    Raises:
        Closed: the other side is gone.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    data = _LENGTH.pack(len(body)) + body
    try:
        if fds:
            sent = socket.send_fds(sock, [data], fds)
            data = data[sent:]
        sock.sendall(data)
    except OSError as error:
        raise Closed(str(error)) from error


def receive(sock: socket.socket, timeout: float | None = None, max_fds: int = 0) -> tuple[Any, list[int]]:
    """The next message and the descriptors that came with it.

    Raises:
        Closed: the other side is gone, or what it sent is no message.
        Late: nothing came within ``timeout`` seconds.
    """
    if timeout is not None and not select.select([sock], [], [], timeout)[0]:
        raise Late
    fds: list[int] = []
    try:
        if max_fds:
            head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, max_fds)
        else:
            head = sock.recv(_LENGTH.size)
        head += _exactly(sock, _LENGTH.size - len(head)) if head else b""
        if not head:
            raise Closed("end of stream")
        return json.loads(_exactly(sock, _LENGTH.unpack(head)[0])), fds
    except (OSError, ValueError) as error:
        raise Closed(str(error)) from error


def _exactly(sock: socket.socket, size: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < size:
        piece = sock.recv(size - len(pieces))
        if not piece:
            raise Closed("end of stream")
        pieces += piece
    return bytes(pieces)

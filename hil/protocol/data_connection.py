"""Frames of data connections: calls over a second Unix socket of the agent, without gRPC.

gRPC needs multiple thread switches for a small call, multiple copies for large data, and 50 ms for imports and set-up.
docs/internals/data-connections.md describes the frames and their order.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
import weakref
from typing import Any, NamedTuple

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from hil.protocol.v1 import agent_pb2 as pb
from hil.protocol.wire import CHUNK, PACKAGE, SERVICES

CALL, READY, MESSAGE, DATA, END = range(1, 6)


class RpcMethod(NamedTuple):
    """Method of the protocol. ``path`` is its gRPC path."""

    service: str
    name: str
    path: str
    request: type[Message]
    reply: type[Message]
    streams_requests: bool
    streams_replies: bool

    @property
    def kind(self) -> str:
        """gRPC's name for the streaming kind, for example ``unary_stream``."""
        return "_".join("stream" if streams else "unary" for streams in (self.streams_requests, self.streams_replies))


METHODS = {
    found.name: RpcMethod(
        service,
        found.name,
        f"/{PACKAGE}.{service}/{found.name}",
        GetMessageClass(found.input_type),
        GetMessageClass(found.output_type),
        found.client_streaming,
        found.server_streaming,
    )
    for service in SERVICES
    for found in pb.DESCRIPTOR.services_by_name[service].methods
}
MAX_CALL = 1 << 12
MAX_ERROR = 1 << 16

HEADER = struct.Struct("<BI")
# Read buffer size. The messages in most calls fit.
_READ = 1 << 16
_TOGETHER = 1 << 15
_CUT = "connection ended in the middle of a frame"
_HUNG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR if hasattr(select, "POLLRDHUP") else select.POLLHUP


def get_data_path(address: str) -> str:
    """Return the path of the data socket for an agent address, or "" for other addresses."""
    kind, _, path = address.partition(":")
    return f"{path}.data" if kind == "unix" and path else ""


def may_go_on(method: str) -> bool:
    """Return True if a connection may serve another call after a successful call of this method.

    False for Hold, because requests are read concurrently with responses.
    """
    return method != "Hold"


class ConnectionBroken(Exception):
    """The connection broke or ended inside a frame."""


class Frames:
    """Frames over a connected socket, which this object closes.

    A thread may send while a different thread reads. Any thread may call :meth:`cancel`. Socket errors raise
    :class:`ConnectionBroken`.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._deadline: float | None = None
        # Close a client's socket when the last reference is gone, because several threads may use the call.
        weakref.finalize(self, connected.close)
        self._read = memoryview(bytearray(_READ))
        self._at = self._end = 0
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHUNK)

    def send(self, kind: int, content: Any = b"") -> None:
        """Send a frame. ``content`` is bytes or a buffer."""
        size = len(content)
        header = HEADER.pack(kind, size)
        try:
            for part in (header + content,) if size <= _TOGETHER else (header, content):
                self._apply_deadline()
                self._socket.sendall(part)
        except OSError as error:
            raise ConnectionBroken(str(error)) from error

    def within(self, seconds: float | None) -> None:
        """Set a common deadline for all later operations, so that a slow peer cannot extend the time byte by byte.

        After the deadline, operations raise ConnectionBroken, caused by TimeoutError. None removes the deadline.
        """
        self._deadline = None if seconds is None else time.monotonic() + seconds
        if seconds is None:
            self._socket.settimeout(None)

    def begin(self) -> tuple[int, int] | None:
        """Wait for the next frame. Return its kind and size, or None at the end of the stream.

        The caller must read the content before the next frame.
        """
        if (here := self._end - self._at) < HEADER.size:
            self._read[:here] = bytes(self._read[self._at : self._end])
            self._at, self._end = 0, here
            while self._end < HEADER.size:
                if not (count := self._receive(self._read[self._end :])):
                    if self._end:
                        raise ConnectionBroken(_CUT)
                    return None
                self._end += count
        kind, size = HEADER.unpack_from(self._read, self._at)
        self._at += HEADER.size
        return kind, size

    def content(self, size: int) -> bytes:
        """Return the content of the current frame."""
        if size <= self._end - self._at:
            self._at += size
            return bytes(self._read[self._at - size : self._at])
        into = bytearray(size)
        self.content_into(memoryview(into))
        return bytes(into)

    def content_into(self, view: memoryview) -> None:
        """Fill a view with the next bytes of the current frame."""
        here = min(view.nbytes, self._end - self._at)
        view[:here] = self._read[self._at : self._at + here]
        self._at += here
        while here < view.nbytes:
            if not (count := self._receive(view[here:])):
                raise ConnectionBroken(_CUT)
            here += count

    def skip(self, size: int, most_s: float) -> None:
        """Discard incoming data, up to ``size`` bytes and ``most_s`` seconds, or until the end of the stream."""
        self._at = self._end = 0
        deadline = time.monotonic() + most_s
        while size > 0 and (left := deadline - time.monotonic()) > 0:
            if self._poll(select.POLLIN, left):
                if not (count := self._receive(self._read)):
                    return
                size -= count

    def is_readable(self) -> bool:
        """Return True if data or the end of the stream is available."""
        return self._at < self._end or self._poll(select.POLLIN)

    def is_open(self) -> bool:
        """Return False if the peer is known to have disconnected."""
        return not self._poll(_HUNG_UP)

    def hang_up(self) -> None:
        """Shut down the sending direction. The connection can still receive data."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def cancel(self) -> None:
        """Shut down the connection and wake up threads that wait for it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket and wake up threads that wait for it."""
        self.cancel()
        self._socket.close()

    def _apply_deadline(self) -> None:
        """Set the socket's timeout to the remaining time. Raises TimeoutError after the deadline."""
        if self._deadline is not None:
            if (left := self._deadline - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            self._socket.settimeout(left)

    def _receive(self, view: memoryview) -> int:
        try:
            self._apply_deadline()
            return self._socket.recv_into(view)
        except OSError as error:
            raise ConnectionBroken(str(error)) from error

    def _poll(self, events: int, seconds: float = 0.0) -> bool:
        poll = select.poll()
        try:
            poll.register(self._socket, events)
        except ValueError:  # closed; the next read reports that
            return True
        return bool(poll.poll(seconds * 1000))

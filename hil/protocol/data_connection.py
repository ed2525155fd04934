"""A data connection: a socket beside the agent's own that carries calls.

gRPC costs a small call several threads' turns, large data several copies, and a command 50 ms of imports and set-up. An
agent that listens on a Unix socket therefore listens on a second one, :func:`data_path`, for the same methods, with the
same messages. A connection carries one call after another, in frames of a byte (the kind), four (the length,
little-endian) and the content:

- the caller sends CALL with a ``DataCall``: the method, the session's token, the agent's; READY says that the call was
  taken on;
- then either side sends MESSAGE (a message of the method) and DATA (what a ``data`` message carries, at most 512 KiB);
- END says that no more comes: empty, or with an ``Error`` where the call failed. After an error, and after a session's
  own call, the agent hangs up.

A caller that gets no READY may make the same call anew: nothing has happened yet.
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
from hil.protocol.wire import CHUNK, SERVICES

CALL, READY, MESSAGE, DATA, END = range(1, 6)


class Method(NamedTuple):
    """A method of the protocol."""

    service: str
    request: type[Message]
    reply: type[Message]
    streams_requests: bool
    streams_replies: bool


def _method(service: str, name: str) -> Method:
    found = pb.DESCRIPTOR.services_by_name[service].methods_by_name[name]
    request, reply = GetMessageClass(found.input_type), GetMessageClass(found.output_type)
    return Method(service, request, reply, found.client_streaming, found.server_streaming)


METHODS = {
    method.name: _method(service, method.name)
    for service in SERVICES
    for method in pb.DESCRIPTOR.services_by_name[service].methods
}
CALL_MOST = 1 << 12
ERROR_MOST = 1 << 16

HEADER = struct.Struct("<BI")
# What comes is read in so large pieces; it is enough for the messages of most calls.
_READ = 1 << 16
_TOGETHER = 1 << 15
_CUT = "it ended in the middle of a frame"
_HUNG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR if hasattr(select, "POLLRDHUP") else select.POLLHUP


def data_path(address: str) -> str:
    """The path of the data connections' socket of an agent at an address; "" where it has none."""
    kind, _, path = address.partition(":")
    return f"{path}.data" if kind == "unix" and path else ""


def may_go_on(method: str) -> bool:
    """Whether a connection may carry another call after one of a method that ended well.

    Not after a session's: what its caller still says is read beside its answers.
    """
    return method != "Hold"


class ConnectionBroken(Exception):
    """The connection broke, or ended in the middle of a frame."""


class Frames:
    """Frames over a connected socket, which it owns. One thread may send while another reads; any may :meth:`cancel`.

    Raises :class:`ConnectionBroken` where the socket breaks.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        # A caller's socket goes with its call, which several threads may hold.
        weakref.finalize(self, connected.close)
        self._read = memoryview(bytearray(_READ))
        self._at = self._end = 0
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHUNK)

    def send(self, kind: int, content: Any = b"") -> None:
        """Send a frame; ``content`` is bytes, or any buffer of them."""
        size = len(content)
        header = HEADER.pack(kind, size)
        try:
            if size <= _TOGETHER:
                self._socket.sendall(header + content)
                return
            sent = self._socket.sendmsg((header, content))
            if sent < len(header):
                self._socket.sendall(header[sent:])
                sent = len(header)
            if sent < len(header) + size:
                self._socket.sendall(memoryview(content)[sent - len(header) :])
        except OSError as error:
            raise ConnectionBroken(str(error)) from error

    def within(self, seconds: float | None) -> None:
        """From now on each step takes so long at most, or ConnectionBroken is raised from TimeoutError."""
        self._socket.settimeout(seconds)

    def begin(self) -> tuple[int, int] | None:
        """The next frame's kind and size, once it comes; its content has to be read next. None at the end."""
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
        """The content of the frame that began."""
        if size <= self._end - self._at:
            self._at += size
            return bytes(self._read[self._at - size : self._at])
        into = bytearray(size)
        self.content_into(memoryview(into))
        return bytes(into)

    def content_into(self, view: memoryview) -> None:
        """Read the next bytes of the frame that began into a view, which they fill."""
        here = min(view.nbytes, self._end - self._at)
        view[:here] = self._read[self._at : self._at + here]
        self._at += here
        while here < view.nbytes:
            if not (count := self._receive(view[here:])):
                raise ConnectionBroken(_CUT)
            here += count

    def skip(self, size: int, most_s: float) -> None:
        """Throw away what comes, so much and so long at most, until the other side has nothing more to say."""
        self._at = self._end = 0
        deadline = time.monotonic() + most_s
        while size > 0 and (left := deadline - time.monotonic()) > 0:
            if self._polled(select.POLLIN, left):
                if not (count := self._receive(self._read)):
                    return
                size -= count

    def is_readable(self) -> bool:
        """Whether something has come, or the end."""
        return self._at < self._end or self._polled(select.POLLIN)

    def is_open(self) -> bool:
        """Whether the other side is still there, as far as is known."""
        return not self._polled(_HUNG_UP)

    def hang_up(self) -> None:
        """Send nothing more; what comes may still be read."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def cancel(self) -> None:
        """End the connection, and whoever waits in it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back; whoever waits in it wakes up."""
        self.cancel()
        self._socket.close()

    def _receive(self, view: memoryview) -> int:
        try:
            return self._socket.recv_into(view)
        except OSError as error:
            raise ConnectionBroken(str(error)) from error

    def _polled(self, events: int, seconds: float = 0.0) -> bool:
        poll = select.poll()
        try:
            poll.register(self._socket, events)
        except ValueError:  # closed, which whoever reads it is told
            return True
        return bool(poll.poll(seconds * 1000))

"""The calls about blobs, programs and logs, over a data connection where there can be one, or over gRPC.

Both kinds raise gRPC's errors, and :class:`hil.errors.ProtocolBroken` for what no agent would send.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import socket
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from hil.controller.devices import answers
from hil.protocol import data_connection as frames
from hil.protocol import wire, wire_errors
from hil.protocol.v1 import agent_pb2 as pb

# For so long an agent may take to take a call on: one that keeps the connection and says nothing hangs.
_OPEN_S = 15.0
_LOOK_S = 0.2
# A call by gRPC that is sent data keeps so many messages waiting.
_AHEAD = 2


class Call(Protocol):
    """A call that goes on. It is for one thread; another may cancel it."""

    def send(self, message: Any) -> None:
        """Send a message, or a memoryview of data (at most ``wire.CHUNK`` bytes), which may change then."""

    def end(self) -> None:
        """Send no more."""

    def receive(self) -> Any:
        """The next message; None where no more comes."""

    def receive_into(self, view: memoryview) -> int:
        """Receive the next data into a view; how many bytes came."""

    def cancel(self) -> None:
        """End the call, and whoever waits in it."""


class CallFailed(grpc.RpcError):
    """A call over a data connection that failed, told as gRPC tells it."""

    def __init__(self, code: grpc.StatusCode, details: str, error: bytes = b"") -> None:
        super().__init__(details)
        self._code, self._details, self._error = code, details, error

    def code(self) -> grpc.StatusCode:
        """The kind of failure."""
        return self._code

    def details(self) -> str:
        """What happened, in words."""
        return self._details

    def trailing_metadata(self) -> Any:
        """The far side's typed error, where it sent one."""
        return ((wire_errors.ERROR_KEY, self._error),) if self._error else ()


class NoDataConnection(Exception):
    """Nobody takes data connections there; the call has not begun."""


class DataCall:
    """A call over a data connection.

    Args:
        path: the socket.
        token: the session's.

    Raises:
        NoDataConnection: nobody takes it on.
        CallFailed: the agent refuses it, or hangs.
    """

    def __init__(self, path: str, method: str, token: str) -> None:
        self._method = method
        carried = frames.METHODS[method]
        self._reply, self._most = carried.reply, answers.MESSAGE_LIMITS[carried.service, method]
        self._came: collections.deque[Any] = collections.deque()
        self._is_over = False
        connected = socket.socket(socket.AF_UNIX)
        self._frames = frames.Frames(connected)
        try:
            connected.settimeout(_OPEN_S)
            connected.connect(path)
            self._frames.send(frames.CALL, pb.DataCall(method=method, session=token).SerializeToString())
            kind, size = self._begin()
            if kind == frames.END:
                self._ended(size)
            connected.settimeout(None)
        except (OSError, frames.ConnectionBroken) as error:
            if isinstance(error.__cause__, TimeoutError):
                raise CallFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "it did not take the call on") from error
            raise NoDataConnection(str(error)) from error
        if kind != frames.READY or size:
            raise NoDataConnection("it does not speak hil's protocol")

    def send(self, message: Any) -> None:
        """Send a message, or data."""
        try:
            if not isinstance(message, memoryview):
                self._frames.send(frames.MESSAGE, message.SerializeToString())
                return
            # An agent that takes no more says why before all was sent.
            while self._frames.is_readable() and not self._is_over:
                self._came.append(self._next())
            self._frames.send(frames.DATA, message)
        except frames.ConnectionBroken as error:
            # Why it hung up may have come before that.
            with contextlib.suppress(frames.ConnectionBroken):
                while not self._is_over:
                    self._next()
            raise _broke(error) from error

    def end(self) -> None:
        """Send no more."""
        with contextlib.suppress(frames.ConnectionBroken):
            self._frames.send(frames.END)

    def receive(self) -> Any:
        """The next message; None where no more comes."""
        if self._came:
            return self._came.popleft()
        try:
            return self._next()
        except frames.ConnectionBroken as error:
            raise _broke(error) from error

    def receive_into(self, view: memoryview) -> int:
        """Receive the next data into a view; how many bytes came."""
        try:
            kind, size = self._begin()
            if kind != frames.DATA or not 0 < size <= view.nbytes:
                if kind == frames.END:
                    self._ended(size)
                raise answers.broken("it sent other data than it announced")
            self._frames.content_into(view[:size])
        except frames.ConnectionBroken as error:
            raise _broke(error) from error
        return size

    def cancel(self) -> None:
        """End the call, and whoever waits in it."""
        self._frames.cancel()

    def _begin(self) -> tuple[int, int]:
        if (begun := self._frames.begin()) is None:
            raise frames.ConnectionBroken("it was closed")
        return begun

    def _next(self) -> Any:
        """The next message; None where no more comes."""
        if self._is_over:
            return None
        kind, size = self._begin()
        if kind == frames.END:
            return self._ended(size)
        if kind != frames.MESSAGE:
            raise answers.broken("it sent data where it announced none")
        if size > self._most:
            raise answers.broken(f"its answer to {self._method} has {size} bytes, and {self._most} are the most")
        try:
            return self._reply.FromString(self._frames.content(size))
        except DecodeError as error:
            raise answers.broken(f"its answer to {self._method} is no message of the protocol") from error

    def _ended(self, size: int) -> None:
        self._is_over = True
        if size > frames.ERROR_MOST:
            raise answers.broken(f"its error has {size} bytes")
        if size:
            error = self._frames.content(size)
            raise CallFailed(grpc.StatusCode.UNKNOWN, "the agent ended the call with an error", error)


def _broke(error: frames.ConnectionBroken) -> CallFailed:
    return CallFailed(grpc.StatusCode.UNAVAILABLE, f"the data connection broke: {error}")


class GrpcCall:
    """A call over gRPC.

    Args:
        called: the stub's method.
        method: what it takes, and answers with.
    """

    def __init__(self, called: Any, method: frames.Method, metadata: list[tuple[str, str]]) -> None:
        self._streams_replies, self._metadata = method.streams_replies, metadata
        # A call with one answer is begun and not waited for, until that is asked for.
        self._called = called if method.streams_replies else called.future
        self._asked: queue.Queue[Any] | None = queue.Queue(_AHEAD) if method.streams_requests else None
        self._replies: Any = None if self._asked is None else called(iter(self._asked.get, None), metadata=metadata)

    def send(self, message: Any) -> None:
        """Send a message, or data."""
        if self._asked is None:
            self._replies = self._called(message, metadata=self._metadata)
        else:
            # Data is copied now: gRPC takes it later, and its caller may have something else there then.
            self._put(self._asked, wire.encode(message) if isinstance(message, memoryview) else message)

    def end(self) -> None:
        """Send no more."""
        if self._asked is not None:
            self._put(self._asked, None)

    def _put(self, asked: queue.Queue[Any], message: Any) -> None:
        while True:
            try:
                asked.put(message, timeout=_LOOK_S)
                return
            except queue.Full:
                # Nobody takes it any more once the call has ended, which its replies then say.
                if not self._replies.is_active():
                    collections.deque(self._replies, maxlen=0)
                    raise answers.broken("it ended the call before all was sent") from None

    def receive(self) -> Any:
        """The next message; None where no more comes."""
        if self._streams_replies:
            return next(self._replies, None)
        try:
            return self._replies.result()
        except grpc.FutureCancelledError as error:
            raise CallFailed(grpc.StatusCode.CANCELLED, "the call was ended here") from error

    def receive_into(self, view: memoryview) -> int:
        """Receive the next data into a view; how many bytes came."""
        data = answers.data_of(self.receive(), view.nbytes)
        view[: data.nbytes] = data
        return data.nbytes

    def cancel(self) -> None:
        """End the call, and whoever waits in it."""
        if self._asked is not None:
            with contextlib.suppress(queue.Full):
                self._asked.put_nowait(None)
        if self._replies is not None:
            self._replies.cancel()


def open_call(stub: wire.Stub, method: str, metadata: list[tuple[str, str]], path: str) -> Call:
    """Begin a call: over a data connection to ``path``, or where nobody takes it there, or it is "", over gRPC.

    Args:
        metadata: of gRPC, with the session's token.

    Raises:
        CallFailed: the agent refuses it, or hangs.
    """
    if path:
        with contextlib.suppress(NoDataConnection):
            return DataCall(path, method, dict(metadata)[wire.SESSION_KEY])
    return GrpcCall(getattr(stub, method), frames.METHODS[method], metadata)

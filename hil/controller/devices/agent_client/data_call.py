"""Call over a data connection (:mod:`hil.protocol.data_connection`)."""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from hil.controller.devices.agent_client import answers
from hil.controller.devices.agent_client.call import CallFailed
from hil.protocol import data_connection as frames
from hil.protocol import wire_errors
from hil.protocol.bounded_message import parse_message
from hil.protocol.v1 import agent_pb2 as pb

# Maximum number of idle connections.
_MOST_RESTING = 4
# How long an agent may take to accept a call. A longer silence on an open connection means that it hangs.
OPEN_S = 15.0
# Replies that arrive before the end of sending acknowledge blobs. Reject more or larger replies to bound memory.
_MAX_EARLY_BYTES, _MAX_EARLY_MESSAGE = 16 << 20, 1 << 16
_LEAST_S = 0.001  # a socket with timeout 0 would not block
_MESSAGE_OVERHEAD = 256  # memory overhead of a message beyond the payload


class NoDataConnection(Exception):
    """The agent accepts no data connection. The call has not begun."""


class DataConnections:
    """Pool of data connections to one agent. A connection carries one call at a time and is reused.

    Args:
        path: The agent's socket for data connections.
        token: The agent's token, if it requires one.
    """

    def __init__(self, path: str, token: str) -> None:
        self._path, self._token = path, token
        self._resting: collections.deque[frames.Frames] = collections.deque()

    def begin(self, method: str, session: str, within_s: float) -> DataCall:
        """Begin a call.

        Args:
            session: Token of the call's session; "" for none.
            within_s: How long the agent may take to accept the call, over all connections tried, in seconds.

        Raises:
            NoDataConnection: The agent accepts no data connection.
            CallFailed: The agent refuses the call or hangs.
        """
        deadline = time.monotonic() + within_s
        called = pb.DataCall(method=method, session=session, token=self._token)
        with contextlib.suppress(IndexError):
            while True:
                # An idle connection may be stale: the agent closed it after an idle timeout, or was replaced.
                with contextlib.suppress(NoDataConnection):
                    return DataCall(self._resting.pop(), called, deadline - time.monotonic(), self._rest)
        connected = self._connected(max(deadline - time.monotonic(), _LEAST_S))
        return DataCall(connected, called, deadline - time.monotonic(), self._rest)

    def close(self) -> None:
        """Close the idle connections."""
        with contextlib.suppress(IndexError):
            while True:
                self._resting.pop().close()

    def _connected(self, within_s: float) -> frames.Frames:
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.settimeout(within_s)
            connected.connect(self._path)
        except OSError as error:
            connected.close()
            raise NoDataConnection(str(error)) from error
        return frames.Frames(connected)

    def _rest(self, connection: frames.Frames) -> None:
        if len(self._resting) < _MOST_RESTING:
            self._resting.append(connection)
        else:
            connection.close()


class DataCall:
    """Call over a data connection.

    Args:
        connection: Connection without another open call.
        called: The method and the tokens.
        open_s: How long the agent may take to accept the call, in seconds.
        rest: Receives the connection after the call, if the connection can be reused.

    Raises:
        NoDataConnection: The agent accepts no data connection.
        CallFailed: The agent refuses the call or hangs.
    """

    def __init__(
        self, connection: frames.Frames, called: pb.DataCall, open_s: float, rest: Callable[[frames.Frames], None]
    ) -> None:
        self._name = called.method
        self._method = method = frames.METHODS[called.method]
        self._most = answers.MESSAGE_LIMITS[method.service, called.method]
        self._frames, self._rest = connection, rest
        self._came: collections.deque[Any] = collections.deque()
        self._early_bytes = 0
        self._has_said_all = not method.streams_requests
        self._is_over = False
        self._lock = threading.Lock()
        try:
            connection.within(open_s)
            connection.send(frames.CALL, called.SerializeToString())
            kind, size = self._begin()
            if kind == frames.END and size:
                self._ended(size)
            connection.within(None)
        except frames.ConnectionBroken as error:
            if isinstance(error.__cause__, TimeoutError):
                raise CallFailed("DEADLINE_EXCEEDED", "timed out accepting the call") from error
            raise NoDataConnection(str(error)) from error
        if kind != frames.READY or size:
            raise NoDataConnection("the server does not use hil's protocol")

    def send(self, message: Any) -> None:
        """Send a message or data."""
        try:
            if not isinstance(message, memoryview):
                self._frames.send(frames.MESSAGE, message.SerializeToString())
                return
            # An agent that stops reading sends the reason before the end of the transfer.
            while self._frames.is_readable() and not self._is_over:
                self._came.append(self._next_early())
            self._frames.send(frames.DATA, message)
        except frames.ConnectionBroken as error:
            # The reason for the disconnect may already be in the socket. Another thread reads the replies of a session.
            with contextlib.suppress(frames.ConnectionBroken):
                while frames.may_go_on(self._name) and not self._is_over:
                    self._next(self._most)
            raise _broke(error) from error

    def end(self) -> None:
        """Close the sending side."""
        with contextlib.suppress(frames.ConnectionBroken):
            self._frames.send(frames.END)
        self._has_said_all = True

    def receive(self) -> Any:
        """Return the next message, or None at the end."""
        if self._came:
            message = self._came.popleft()
            if not self._came:
                self._early_bytes = 0
            return message
        try:
            message = self._next(self._most)
            if message is not None and not self._method.streams_replies and self._next(self._most) is not None:
                raise answers.broken("duplicate response")
            return message
        except frames.ConnectionBroken as error:
            raise _broke(error) from error

    def receive_into(self, view: memoryview) -> int:
        """Receive the next data into a view. Return the number of bytes."""
        try:
            kind, size = self._begin()
            if kind != frames.DATA or not 0 < size <= view.nbytes:
                if kind == frames.END:
                    self._ended(size)
                raise answers.broken("data does not match the announcement")
            self._frames.content_into(view[:size])
        except frames.ConnectionBroken as error:
            raise _broke(error) from error
        return size

    def cancel(self) -> None:
        """Cancel the call and wake threads that wait in it."""
        # After the call, the connection may already carry the next call.
        with self._lock:
            if not self._is_over:
                self._frames.cancel()

    def _begin(self) -> tuple[int, int]:
        if (begun := self._frames.begin()) is None:
            raise frames.ConnectionBroken("the connection was closed")
        return begun

    def _next_early(self) -> Any:
        """Return a message that arrives during sending. Such messages must be few and short."""
        message = self._next(min(self._most, _MAX_EARLY_MESSAGE))
        if message is not None:
            self._early_bytes += message.ByteSize() + _MESSAGE_OVERHEAD
        if self._early_bytes > _MAX_EARLY_BYTES:
            raise answers.broken(f"responses to {self._name} exceed the limit")
        return message

    def _next(self, most: int) -> Any:
        """Return the next message of at most ``most`` bytes, or None at the end."""
        if self._is_over:
            return None
        kind, size = self._begin()
        if kind == frames.END:
            return self._ended(size)
        if kind != frames.MESSAGE:
            raise answers.broken("unannounced data")
        if size > most:
            raise answers.broken(f"response to {self._name} has {size} bytes, over the limit of {most}")
        try:
            return parse_message(self._method.reply, self._frames.content(size))
        except DecodeError as error:
            raise answers.broken(f"cannot decode the response to {self._name}") from error

    def _ended(self, size: int) -> None:
        with self._lock:
            self._is_over = True
        if not size and self._has_said_all and frames.may_go_on(self._name):
            self._rest(self._frames)
            return
        error = self._frames.content(size) if size <= frames.ERROR_MOST else b""
        self._frames.cancel()
        if size > frames.ERROR_MOST:
            raise answers.broken(f"error of {size} bytes exceeds the limit")
        if size:
            found = wire_errors.from_bytes(error)
            raise CallFailed("UNKNOWN", found.message if found else "the agent ended the call with an error", error)


def _broke(error: frames.ConnectionBroken) -> CallFailed:
    return CallFailed("UNAVAILABLE", f"the data connection broke: {error}")

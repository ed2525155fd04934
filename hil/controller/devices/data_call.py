"""A call over a data connection (:mod:`hil.protocol.data_connection`)."""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from hil.controller.devices import answers
from hil.controller.devices.call import CallFailed
from hil.protocol import data_connection as frames
from hil.protocol import wire_errors
from hil.protocol.v1 import agent_pb2 as pb

# Of connections that rest, so many are kept.
_MOST_RESTING = 4
# For so long an agent may take to take a call on: one that keeps the connection and says nothing hangs.
OPEN_S = 15.0


class NoDataConnection(Exception):
    """Nobody takes data connections there; the call has not begun."""


class DataConnections:
    """The data connections to one agent: each carries a call, and then rests until the next.

    Args:
        path: the agent's socket for them.
        token: the agent's, where it asks for one.
    """

    def __init__(self, path: str, token: str) -> None:
        self._path, self._token = path, token
        self._resting: collections.deque[frames.Frames] = collections.deque()

    def begin(self, method: str, session: str, within_s: float) -> DataCall:
        """Begin a call.

        Args:
            session: the token of the session that it belongs to; "" where it belongs to none.
            within_s: how long the agent may take to take it on.

        Raises:
            NoDataConnection: nobody takes it on.
            CallFailed: the agent refuses it, or hangs.
        """
        called = pb.DataCall(method=method, session=session, token=self._token)
        with contextlib.suppress(IndexError):
            while True:
                # One that rested may be gone: the agent has an end of patience, or is another by now.
                with contextlib.suppress(NoDataConnection):
                    return DataCall(self._resting.pop(), called, within_s, self._rest)
        return DataCall(self._connected(within_s), called, within_s, self._rest)

    def close(self) -> None:
        """Close those that rest."""
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
    """A call over a data connection.

    Args:
        connection: on which no other call goes on.
        called: the method, and the tokens.
        open_s: for so long the agent may take to take it on.
        rest: is given the connection when the call has ended and another may follow.

    Raises:
        NoDataConnection: nobody takes it on.
        CallFailed: the agent refuses it, or hangs.
    """

    def __init__(
        self, connection: frames.Frames, called: pb.DataCall, open_s: float, rest: Callable[[frames.Frames], None]
    ) -> None:
        self._name = called.method
        self._method = method = frames.METHODS[called.method]
        self._most = answers.MESSAGE_LIMITS[method.service, called.method]
        self._frames, self._rest = connection, rest
        self._came: collections.deque[Any] = collections.deque()
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
                raise CallFailed("DEADLINE_EXCEEDED", "it did not take the call on") from error
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
            # Why it hung up may have come before that. A session's answers are another thread's to read.
            with contextlib.suppress(frames.ConnectionBroken):
                while frames.may_go_on(self._name) and not self._is_over:
                    self._next()
            raise _broke(error) from error

    def end(self) -> None:
        """Send no more."""
        with contextlib.suppress(frames.ConnectionBroken):
            self._frames.send(frames.END)
        self._has_said_all = True

    def receive(self) -> Any:
        """The next message; None where no more comes."""
        if self._came:
            return self._came.popleft()
        try:
            message = self._next()
            if message is not None and not self._method.streams_replies and self._next() is not None:
                raise answers.broken("it answered twice")
            return message
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
        # When it is over its connection may carry another one already.
        with self._lock:
            if not self._is_over:
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
            raise answers.broken(f"its answer to {self._name} has {size} bytes, and {self._most} are the most")
        try:
            return self._method.reply.FromString(self._frames.content(size))
        except DecodeError as error:
            raise answers.broken(f"its answer to {self._name} is no message of the protocol") from error

    def _ended(self, size: int) -> None:
        with self._lock:
            self._is_over = True
        if not size and self._has_said_all and frames.may_go_on(self._name):
            self._rest(self._frames)
            return
        error = self._frames.content(size) if size <= frames.ERROR_MOST else b""
        self._frames.cancel()
        if size > frames.ERROR_MOST:
            raise answers.broken(f"its error has {size} bytes")
        if size:
            found = wire_errors.from_bytes(error)
            raise CallFailed("UNKNOWN", found.message if found else "the agent ended the call with an error", error)


def _broke(error: frames.ConnectionBroken) -> CallFailed:
    return CallFailed("UNAVAILABLE", f"the data connection broke: {error}")

"""Transport over data connections (:mod:`hil.protocol.data_connection`)."""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
import time
from collections.abc import Callable

from hil.controller.devices.agent_client import answers
from hil.controller.devices.agent_client.call import CallFailed
from hil.protocol import data_connection as frames
from hil.protocol import wire_errors
from hil.protocol.v1 import agent_pb2 as pb

# Maximum idle connections.
_MAX_RESTING = 4
_MIN_TIMEOUT_SECONDS = 0.001  # a socket with timeout 0 would not block


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

    def open(self, method: str, session: str, within_s: float) -> DataStream:
        """Open a call.

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
                    return DataStream(self._resting.pop(), called, deadline - time.monotonic(), self._keep_idle)
        connected = self._connect(max(deadline - time.monotonic(), _MIN_TIMEOUT_SECONDS))
        return DataStream(connected, called, deadline - time.monotonic(), self._keep_idle)

    def close(self) -> None:
        """Close the idle connections."""
        with contextlib.suppress(IndexError):
            while True:
                self._resting.pop().close()

    def _connect(self, within_s: float) -> frames.Frames:
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.settimeout(within_s)
            connected.connect(self._path)
        except OSError as error:
            connected.close()
            raise NoDataConnection(str(error)) from error
        return frames.Frames(connected)

    def _keep_idle(self, connection: frames.Frames) -> None:
        if len(self._resting) < _MAX_RESTING:
            self._resting.append(connection)
        else:
            connection.close()


class DataStream:
    """Frames of one call on a connection that carries no other call. Raises the errors of :meth:`DataConnections.open`.

    Args:
        called: The method and the tokens.
        open_s: How long the agent may take to accept the call, in seconds.
        rest: Called with the connection after the call, if the connection can be reused.
    """

    def __init__(
        self, connection: frames.Frames, called: pb.DataCall, open_s: float, rest: Callable[[frames.Frames], None]
    ) -> None:
        self._frames, self._rest = connection, rest
        self.send, self.content, self.content_into = connection.send, connection.content, connection.content_into
        self._can_rest = self._is_over = False
        self._lock = threading.Lock()
        try:
            connection.within(open_s)
            connection.send(frames.CALL, called.SerializeToString())
            begun = self.begin()
            connection.within(None)
        except frames.ConnectionBroken as error:
            if isinstance(error.__cause__, TimeoutError):
                raise CallFailed("DEADLINE_EXCEEDED", "the agent did not accept the call in time") from error
            raise NoDataConnection(str(error)) from error
        if begun != (frames.READY, 0):
            raise NoDataConnection("the server does not use hil's protocol")
        self._is_last = not frames.may_go_on(called.method)
        self._can_rest = not frames.METHODS[called.method].streams_requests and not self._is_last

    def end(self) -> None:
        """Close the sending side."""
        self._frames.send(frames.END)
        self._can_rest = not self._is_last

    def is_readable(self) -> bool:
        """Return whether a frame has arrived."""
        return not self._is_over and self._frames.is_readable()

    def begin(self) -> tuple[int, int] | None:
        """Wait for the next frame. Return its kind and size, or None at the end."""
        if self._is_over:
            return None
        if (begun := self._frames.begin()) is None:
            raise frames.ConnectionBroken("the connection was closed")
        if begun[0] != frames.END:
            return begun
        self._finish(begun[1])
        return None

    def cancel(self) -> None:
        """Cancel the call and wake threads that wait in it."""
        # Do nothing after the call has ended, because the connection may already carry the next call.
        with self._lock:
            if not self._is_over:
                self._frames.cancel()

    def _finish(self, size: int) -> None:
        with self._lock:
            self._is_over = True
        if not size and self._can_rest:
            self._rest(self._frames)
            return
        error = self._frames.content(size) if size <= frames.MAX_ERROR else b""
        self._frames.cancel()
        if size > frames.MAX_ERROR:
            raise answers.make_protocol_error(f"error of {size} bytes exceeds the limit")
        if size:
            found = wire_errors.decode_error(error)
            raise CallFailed("UNKNOWN", found.message if found else "the agent ended the call with an error", error)

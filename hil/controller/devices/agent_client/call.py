"""Call to an agent, implemented once for every transport.

A transport only opens streams and moves frames: see :class:`CallStream`.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from hil.controller.devices.agent_client import answers
from hil.protocol.bounded_message import parse_message
from hil.protocol.data_connection import DATA, MESSAGE, ConnectionBroken, RpcMethod, may_go_on

# Limits for replies that arrive while hil is still sending. Such replies acknowledge blobs, so they are few and small.
# The limits bound the memory.
_MAX_EARLY_BYTES, _MAX_EARLY_MESSAGE = 16 << 20, 1 << 16
_MESSAGE_OVERHEAD = 256  # memory overhead of a message beyond the payload


class CallFailed(Exception):
    """Failure of a call.

    Args:
        code: gRPC status name, such as ``UNAVAILABLE``.
        text: Description of the failure.
        error: The remote side's typed error, serialised; empty if it sent none.
    """

    def __init__(self, code: str, text: str, error: bytes = b"") -> None:
        super().__init__(text)
        self.code, self.text, self.error = code, text, error


class CallStream(Protocol):
    """Frames of one open call. A broken transport raises ConnectionBroken, a failed call :class:`CallFailed`."""

    def send(self, kind: int, content: Any) -> None:
        """Send a MESSAGE or DATA frame. The buffer of the content may be reused afterwards."""

    def end(self) -> None:
        """Close the sending side."""

    def is_readable(self) -> bool:
        """Return whether a frame has arrived. An agent that stops reading sends the reason during the transfer."""

    def begin(self) -> tuple[int, int] | None:
        """Wait for the next frame. Return its kind and size, or None at the end. Read the content next."""

    def content(self, size: int) -> bytes:
        """Return the content of the current frame."""

    def content_into(self, view: memoryview) -> None:
        """Fill a view with the content of the current frame."""

    def cancel(self) -> None:
        """Cancel the call and wake threads that wait in it."""


class Call:
    """Open call, and iterator over its replies. One thread may send while another receives; any thread may cancel.

    All methods but :meth:`cancel` raise :class:`CallFailed`, and ProtocolBroken for an invalid response.
    """

    def __init__(self, method: RpcMethod, stream: CallStream) -> None:
        self.stream = stream
        self.cancel = stream.cancel
        self._method = method
        self._limit = answers.MESSAGE_LIMITS[method.service, method.name]
        self._early: collections.deque[Any] = collections.deque()
        self._early_bytes = 0

    def send(self, message: Any) -> None:
        """Send a message, or data as a memoryview of at most ``wire.CHUNK`` bytes.

        The buffer may be reused afterwards.
        """
        try:
            if isinstance(message, memoryview):
                while self.stream.is_readable() and self._receive_early():
                    pass
                self.stream.send(DATA, message)
            else:
                self.stream.send(MESSAGE, message.SerializeToString())
        except ConnectionBroken as error:
            raise self._explain(error) from error

    def end(self) -> None:
        """Close the sending side. If that fails, receiving reports the reason."""
        with contextlib.suppress(ConnectionBroken):
            self.stream.end()

    def receive(self) -> Any:
        """Return the next message, or None at the end."""
        if self._early:
            message = self._early.popleft()
            if not self._early:
                self._early_bytes = 0
            return message
        try:
            message = self._read_next(self._limit)
            if message is not None and not self._method.streams_replies and self._read_next(self._limit) is not None:
                raise answers.make_protocol_error("duplicate response")
        except ConnectionBroken as error:
            raise _make_broken_error(error) from error
        return message

    def receive_into(self, view: memoryview) -> int:
        """Receive the next data into a view. Return the number of bytes."""
        try:
            kind, size = self.stream.begin() or (0, 0)
            if kind == DATA and 0 < size <= view.nbytes:
                self.stream.content_into(view[:size])
                return size
            # Agents of other versions may encode data in a form that the transport does not recognize, so parse the
            # message.
            data = getattr(self._parse(size, self._limit), "data", b"") if kind == MESSAGE else b""
        except ConnectionBroken as error:
            raise _make_broken_error(error) from error
        if not 0 < len(data) <= view.nbytes:
            raise answers.make_protocol_error("data does not match the announcement")
        view[: len(data)] = data
        return len(data)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if (reply := self.receive()) is None:
            raise StopIteration
        return reply

    def _receive_early(self) -> bool:
        """Receive a message during sending. Such messages must be few and short. Return False at the end."""
        message = self._read_next(min(self._limit, _MAX_EARLY_MESSAGE))
        self._early.append(message)
        if message is not None:
            self._early_bytes += message.ByteSize() + _MESSAGE_OVERHEAD
        if self._early_bytes > _MAX_EARLY_BYTES:
            raise answers.make_protocol_error(f"responses to {self._method.name} exceed the limit")
        return message is not None

    def _read_next(self, limit: int) -> Any:
        """Return the next message of at most ``limit`` bytes, or None at the end."""
        if (begun := self.stream.begin()) is None:
            return None
        kind, size = begun
        if kind != MESSAGE:
            raise answers.make_protocol_error("unannounced data")
        return self._parse(size, limit)

    def _parse(self, size: int, limit: int) -> Any:
        if size > limit:
            raise answers.make_protocol_error(
                f"response to {self._method.name} has {size} bytes, over the limit of {limit}"
            )
        try:
            return parse_message(self._method.reply, self.stream.content(size))
        except DecodeError as error:
            raise answers.make_protocol_error(f"cannot decode the response to {self._method.name}") from error

    def _explain(self, error: ConnectionBroken) -> Exception:
        """Return the error for a failed send. Raises the agent's error if it has arrived."""
        if not may_go_on(self._method.name):  # another thread reads the replies of a session
            return _make_broken_error(error)
        try:
            while self._read_next(self._limit) is not None:
                pass
        except ConnectionBroken:
            return _make_broken_error(error)
        return answers.make_protocol_error("the call ended before the upload finished")


def _make_broken_error(error: ConnectionBroken) -> CallFailed:
    return CallFailed("UNAVAILABLE", f"the data connection broke: {error}")

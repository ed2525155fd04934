"""Interface and errors of a call to an agent, independent of the transport."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol


class Call(Protocol):
    """Open call. One thread may send while another receives; any thread may cancel it."""

    def send(self, message: Any) -> None:
        """Send a message, or data as a memoryview of at most ``wire.CHUNK`` bytes.

        The buffer may be reused afterwards.
        """

    def end(self) -> None:
        """Close the sending side."""

    def receive(self) -> Any:
        """Return the next message, or None at the end."""

    def receive_into(self, view: memoryview) -> int:
        """Receive the next data into a view. Return the number of bytes."""

    def cancel(self) -> None:
        """Cancel the call and wake threads that wait in it."""


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


class Replies:
    """Iterator over the replies of a concurrent call, until it is cancelled. Raises :class:`CallFailed`."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.cancel = call.cancel

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if (reply := self._call.receive()) is None:
            raise StopIteration
        return reply

"""What a call of an agent is, whichever way it goes, and how it fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol


class Call(Protocol):
    """A call that goes on. One thread may send while another receives; any may cancel it."""

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


class CallFailed(Exception):
    """A call that failed.

    Args:
        code: the name of gRPC's status for that, such as ``UNAVAILABLE``.
        text: what happened, in words.
        error: the far side's typed error, serialised, where it sent one.
    """

    def __init__(self, code: str, text: str, error: bytes = b"") -> None:
        super().__init__(text)
        self.code, self.text, self.error = code, text, error


class Replies:
    """The replies of a call that goes on beside others, until it is cancelled. Raises :class:`CallFailed`."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.cancel = call.cancel

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if (reply := self._call.receive()) is None:
            raise StopIteration
        return reply

"""A worker's call of the farm's service ``Hosts``, carried by its host's uplink (:mod:`.uplink`)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hil.controller.farm.rpc import methods
from hil.errors import FarmUnreachable
from hil.protocol import wire_errors
from hil.protocol.data_connection import CALL, END, MESSAGE, READY, ConnectionBroken, Frames

_REPLIES = {name: answered for name, _, _, _, answered in methods("Hosts")}
# An uplink tries every gateway first.
_READY_S = 30.0


class UplinkCall:
    """One call. One thread may send while another reads; any may cancel it.

    Args:
        uplink: the uplink's socket.
        method: its name, ``Attend``.
        ready_s: how long the uplink may take to find a gateway.

    Raises:
        FarmUnreachable: no gateway answers, or the uplink does not.
        HilError: what the gateway ended the call with; so do all methods that read.
    """

    def __init__(self, uplink: Path, method: str, ready_s: float = _READY_S) -> None:
        self._reply = _REPLIES[method]
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.settimeout(ready_s)
            connected.connect(str(uplink))
        except OSError as error:
            connected.close()
            raise FarmUnreachable(f"the host's connection to the farm is away: {error.strerror or error}") from error
        self._frames = Frames(connected)
        try:
            with _broken():
                self._frames.send(CALL, method.encode())
            self.gateway = (self._read(READY) or b"").decode()  # its address, from this host
        except BaseException:
            self.close()
            raise
        self._frames.within(None)

    def send(self, message: Any) -> None:
        """Send a message; None says that no more comes."""
        with _broken():
            if message is None:
                self._frames.send(END)
            else:
                self._frames.send(MESSAGE, message.SerializeToString())

    def replies(self) -> Iterator[Any]:
        """The gateway's messages, until it ends the call."""
        while (content := self._read(MESSAGE)) is not None:
            yield self._reply.FromString(content)

    def within(self, seconds: float) -> None:
        """From now on each step takes so long at most."""
        self._frames.within(seconds)

    def cancel(self) -> None:
        """End the call, and whoever waits in it."""
        self._frames.cancel()

    def close(self) -> None:
        """End the call, and give its socket back."""
        self._frames.close()

    def _read(self, wanted: int) -> bytes | None:
        """The content of a frame of this kind; None where the call ends instead."""
        with _broken():
            while (began := self._frames.begin()) is not None:
                kind, content = began[0], self._frames.content(began[1])
                if kind == wanted:
                    return content
                if kind == END:
                    if (error := wire_errors.from_bytes(content)) is not None:
                        raise error
                    return None
        raise FarmUnreachable("the host's connection to the farm broke off")


def ask(uplink: Path, method: str, request: Any, limit_s: float) -> Any:
    """Make a call of one message each way; FarmUnreachable where no step of it comes within so long."""
    with contextlib.closing(UplinkCall(uplink, method, min(limit_s, _READY_S))) as call:
        call.within(limit_s)
        call.send(request)
        call.send(None)
        replies = list(call.replies())
    if not replies:
        raise FarmUnreachable("the gateway ended the call without an answer")
    return replies[0]


@contextlib.contextmanager
def _broken() -> Iterator[None]:
    try:
        yield
    except ConnectionBroken as error:
        raise FarmUnreachable(f"the host's connection to the farm broke off: {error}") from error

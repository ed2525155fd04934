"""Calls of the farm's service ``Hosts`` by a worker, forwarded by the uplink (:mod:`.uplink`)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from hil.controller.farm.rpc import iter_methods
from hil.errors import FarmError, FarmUnreachable
from hil.protocol import wire_errors
from hil.protocol.bounded_message import MAX_FARM_FIELDS, parse_message
from hil.protocol.data_connection import CALL, END, MESSAGE, READY, ConnectionBroken, Frames

_REPLIES = {name: answered for name, _, _, _, answered in iter_methods("Hosts")}
# The uplink may try every gateway first.
_READY_SECONDS = 30.0
# Limit of a gateway's message: a grant contains a job's options and file names.
_MAX_MESSAGE = 64 << 20
_HINT = "check that the gateway has the same hil version"


class UplinkCall:
    """Call in progress. A thread may send while another thread reads. Any thread may cancel the call.

    Args:
        uplink: socket of the uplink.
        method: method name, such as ``Attend``.
        ready_s: timeout for the uplink to find a gateway.

    Raises:
        FarmUnreachable: the uplink is unreachable, or finds no gateway.
        HilError: error of the gateway; reading methods also raise this error.
    """

    def __init__(self, uplink: Path, method: str, ready_s: float = _READY_SECONDS) -> None:
        self._reply = _REPLIES[method]
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.settimeout(ready_s)
            connected.connect(str(uplink))
        except OSError as error:
            connected.close()
            raise FarmUnreachable(f"the host is not connected to the farm: {error.strerror or error}") from error
        self._frames = Frames(connected)
        try:
            with _convert_errors():
                self._frames.send(CALL, method.encode())
            self.gateway = (self._read_content(READY) or b"").decode(errors="replace")  # the gateway's address
        except BaseException:
            self.close()
            raise
        self._frames.within(None)

    def send(self, message: Any) -> None:
        """Send a message. None ends the requests."""
        with _convert_errors():
            if message is None:
                self._frames.send(END)
            else:
                self._frames.send(MESSAGE, message.SerializeToString())

    def iter_replies(self) -> Iterator[Any]:
        """Yield the gateway's messages."""
        while (content := self._read_content(MESSAGE)) is not None:
            try:
                reply = parse_message(self._reply, content, MAX_FARM_FIELDS)
            except DecodeError as error:
                raise FarmError("the gateway sent an invalid message", hint=_HINT) from error
            yield reply

    def within(self, seconds: float) -> None:
        """Set a common timeout for all later steps."""
        self._frames.within(seconds)

    def cancel(self) -> None:
        """Cancel the call and wake up waiting threads."""
        self._frames.cancel()

    def close(self) -> None:
        """End the call and close the socket."""
        self._frames.close()

    def _read_content(self, wanted: int) -> bytes | None:
        """Return the content of the next frame of this type, or None at the end of the call."""
        with _convert_errors():
            while (began := self._frames.begin()) is not None:
                kind, size = began
                if size > _MAX_MESSAGE:
                    raise FarmError(
                        f"the gateway sent a message of {size} bytes; the limit is {_MAX_MESSAGE}", hint=_HINT
                    )
                content = self._frames.content(size)
                if kind == wanted:
                    return content
                if kind == END:
                    if (error := wire_errors.decode_error(content)) is not None:
                        raise error
                    return None
        raise FarmUnreachable("the host lost the connection to the farm")


def ask(uplink: Path, method: str, request: Any, limit_s: float) -> Any:
    """Make a unary call. Raises FarmUnreachable after the timeout."""
    with contextlib.closing(UplinkCall(uplink, method, min(limit_s, _READY_SECONDS))) as call:
        call.within(limit_s)
        # The gateway may respond, and the uplink close the connection, before the end of the request. The response is
        # then still readable. Without a response, reading raises the error.
        with contextlib.suppress(FarmUnreachable):
            call.send(request)
            call.send(None)
        replies = list(call.iter_replies())
    if not replies:
        raise FarmUnreachable("the gateway ended the call without a response")
    return replies[0]


@contextlib.contextmanager
def _convert_errors() -> Iterator[None]:
    try:
        yield
    except ConnectionBroken as error:
        raise FarmUnreachable(f"the host lost the connection to the farm: {error}") from error

"""Serve calls over data connections (:mod:`hil.protocol.data_connection`)."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hil.agent.admission import Room
from hil.agent.calls import Calls, check_size, decode_request
from hil.errors import BoardBusy, UsageError
from hil.protocol import wire, wire_errors
from hil.protocol.bounded_message import parse_message
from hil.protocol.data_connection import (
    CALL,
    DATA,
    END,
    MAX_CALL,
    MESSAGE,
    METHODS,
    READY,
    ConnectionBroken,
    Frames,
    RpcMethod,
    may_go_on,
)
from hil.protocol.listening import restrict_socket
from hil.protocol.local_socket import LocalSocket
from hil.protocol.v1 import agent_pb2 as pb

# After a failed call, read and discard the client's remaining data, up to this size and time. Otherwise the client
# might not receive the error.
_UNREAD_BYTES = 64 << 20
_UNREAD_SECONDS = 2.0
# Maximum number of failed calls whose data is discarded at the same time. Further connections are closed immediately.
_MAX_UNREAD = 32
# Time limit for sending the final frame to a client that does not read. Admission control no longer limits this call.
_FINAL_FRAME_SECONDS = 5.0


class DataCallContext:
    """Call context of a data connection: the subset of gRPC's context that the handlers use."""

    def __init__(self, frames: Frames, session: str = "") -> None:
        self._session = session
        self.cancel = frames.cancel
        self.is_active = frames.is_open

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the session token in the form of gRPC metadata."""
        return ((wire.SESSION_KEY, self._session),)


class DataServer:
    """Server at a Unix socket that only its user can open.

    Raises:
        OSError: listening failed.
        UsageError: the path exists and is not a socket.
    """

    def __init__(self, path: str, calls: Calls) -> None:
        self._path, self._calls = Path(path), calls
        self._unread = threading.BoundedSemaphore(_MAX_UNREAD)
        with restrict_socket(self._path):
            self._socket = LocalSocket(self._path, self._serve, "data-call")

    def close(self) -> None:
        """Stop accepting calls and close the open connections."""
        self._path.unlink(missing_ok=True)  # before close: a later unlink could delete a new server's file
        self._socket.close()

    def _serve(self, connected: socket.socket) -> None:
        frames = Frames(connected)
        with contextlib.closing(frames), contextlib.suppress(ConnectionBroken):
            try:
                called = self._read_call(frames, self._calls.admission.silent)
                while called is not None:
                    self._answer_call(frames, called)
                    _send_last(frames)
                    method, called = called.method, None
                    if may_go_on(method):
                        # If too many connections are idle, close this connection.
                        with contextlib.suppress(BoardBusy):
                            called = self._read_call(frames, self._calls.admission.resting)
            except ConnectionBroken:
                raise
            except Exception as error:
                _send_last(
                    frames,
                    wire_errors.to_message(wire.make_reported_error(error), wire.KEPT_ERRORS).SerializeToString(),
                )
            frames.hang_up()
            if self._unread.acquire(blocking=False):
                try:
                    frames.skip(_UNREAD_BYTES, _UNREAD_SECONDS)
                finally:
                    self._unread.release()

    def _read_call(self, frames: Frames, waits_in: Room) -> pb.DataCall | None:
        """Return the next call, or None if the client closed the connection."""
        with waits_in.count_call(DataCallContext(frames)):
            # The client's END frame of the previous call may arrive after the response was sent.
            while (begun := frames.begin()) is not None and begun == (END, 0):
                pass
            if begun is None:
                return None
            kind, size = begun
            if kind != CALL:
                raise UsageError("the first frame must name the call")
            if size > MAX_CALL:
                raise UsageError(f"a call's first frame has {size} bytes, maximum {MAX_CALL}")
            called: pb.DataCall = decode_request(frames.content(size), pb.DataCall.FromString)
            return called

    def _answer_call(self, frames: Frames, called: pb.DataCall) -> None:
        self._calls.check_token(called.token)
        if (method := METHODS.get(called.method)) is None:
            raise UsageError(f"unknown method {called.method[:100]!r}")
        requests, context = _read_requests(frames, method), DataCallContext(frames, called.session)
        # End the call before sending the last frame: the client may start its next call immediately.
        with contextlib.closing(self._calls.serve(method, requests, context)) as replies:
            for reply in replies:
                if isinstance(reply, memoryview):
                    frames.send(DATA, reply)
                else:
                    frames.send(MESSAGE, reply.SerializeToString())


def _send_last(frames: Frames, error: bytes = b"") -> None:
    """Send the final frame of a call."""
    frames.within(_FINAL_FRAME_SECONDS)
    frames.send(END, error)
    frames.within(None)


def _read_requests(frames: Frames, method: RpcMethod) -> Iterator[Any]:
    """Yield a client's requests: messages, and data as memoryviews, valid only during the iteration.

    The first iteration sends READY, which confirms that the call was accepted.
    """
    frames.send(READY)
    takes_data = wire.may_contain_data(method.request)
    room = memoryview(b"")
    while (begun := frames.begin()) is not None and begun[0] != END:
        kind, size = begun
        if kind == DATA:
            if not takes_data:
                raise UsageError(f"the method {method.name} does not accept data")
            if size > wire.CHUNK:
                raise UsageError(f"a data chunk has {size} bytes, maximum {wire.CHUNK}")
            room = room if room.nbytes else memoryview(bytearray(wire.CHUNK))
            frames.content_into(room[:size])
            yield room[:size]
        elif kind == MESSAGE:
            check_size(method.name, size)
            message = decode_request(frames.content(size), partial(parse_message, method.request))
            if takes_data and message.HasField("data"):
                raise UsageError("data must be in separate frames, not in a message")
            yield message
        else:
            raise UsageError(f"unexpected frame of kind {kind}")

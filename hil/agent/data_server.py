"""Data connections of the agent: the calls of its services over a Unix socket of their own, without gRPC.

The handlers, the rooms that bound how many calls go on, and what ends these are those of the gRPC server.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hil.agent.admission import Admission, Room, argument_of, check_size, check_token, decoded
from hil.errors import BoardBusy, UsageError
from hil.protocol import wire, wire_errors
from hil.protocol.data_connection import (
    CALL,
    CALL_MOST,
    DATA,
    END,
    MESSAGE,
    METHODS,
    READY,
    ConnectionBroken,
    Frames,
    may_go_on,
)
from hil.protocol.listening import private_socket
from hil.protocol.local_socket import LocalSocket
from hil.protocol.v1 import agent_pb2 as pb

# What a failed call still sends is read, so much of it and for so long, or its caller might not get to read why.
_UNREAD_BYTES = 64 << 20
_UNREAD_S = 2.0


class DataCallContext:
    """What a handler may ask of a call on a data connection: as much of gRPC's context as these handlers use."""

    def __init__(self, frames: Frames, session: str = "") -> None:
        self._session = session
        self.cancel = frames.cancel
        self.is_active = frames.is_open

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """The session's token, as a gRPC call carries it."""
        return ((wire.SESSION_KEY, self._session),)


class DataServer:
    """Listens at a Unix socket that only its user can open.

    Args:
        servicers: by the name of the service.
        token: what callers must know; "" where that is nothing.

    Raises:
        OSError: it cannot listen there.
        UsageError: what lies there is no socket.
    """

    def __init__(self, path: str, admission: Admission, servicers: dict[str, Any], token: str) -> None:
        self._path = Path(path)
        self._admission = admission
        self._servicers = servicers
        self._token = token
        with private_socket(self._path):
            self._socket = LocalSocket(self._path, self._serve, "data-call")

    def close(self) -> None:
        """Take on no more calls, and end those that go on."""
        self._path.unlink(missing_ok=True)  # as long as it is ours
        self._socket.close()

    def _serve(self, connected: socket.socket) -> None:
        frames = Frames(connected)
        with contextlib.closing(frames), contextlib.suppress(ConnectionBroken):
            try:
                called = self._called(frames, self._admission.silent)
                while called is not None:
                    self._answer(frames, called)
                    frames.send(END)
                    called = self._next_called(frames) if may_go_on(called.method) else None
            except ConnectionBroken:
                raise
            except Exception as error:
                frames.send(END, wire_errors.to_message(wire.failure(error), wire.KEPT_ERRORS).SerializeToString())
            frames.hang_up()
            frames.skip(_UNREAD_BYTES, _UNREAD_S)

    def _called(self, frames: Frames, waits_in: Room) -> pb.DataCall | None:
        """The next call; None where no more comes."""
        with waits_in.entered(DataCallContext(frames)):
            # The caller's own end of the call before this one may come after the answer's.
            while (begun := frames.begin()) is not None and begun == (END, 0):
                pass
            if begun is None:
                return None
            kind, size = begun
            if kind != CALL:
                raise UsageError("a call begins with a frame that says which")
            if size > CALL_MOST:
                raise UsageError(f"a call's first frame has {size} bytes, and {CALL_MOST} are the most")
            called: pb.DataCall = decoded(frames.content(size), pb.DataCall.FromString)
            return called

    def _next_called(self, frames: Frames) -> pb.DataCall | None:
        """The call after another one; None where no more comes, or too many connections rest: nobody has asked yet."""
        try:
            return self._called(frames, self._admission.resting)
        except BoardBusy:
            return None

    def _answer(self, frames: Frames, called: pb.DataCall) -> None:
        check_token(self._token, called.token)
        if (method := METHODS.get(called.method)) is None:
            raise UsageError(f"the protocol has no method {called.method[:100]!r}")
        context = DataCallContext(frames, called.session)
        behaviour = getattr(self._servicers[method.service], called.method)
        path = f"/{wire.PACKAGE}.{method.service}/{called.method}"
        with self._admission.admitted(path, method.streams_requests, _requests(frames, called.method), context) as sent:
            answers = behaviour(argument_of(sent, method.streams_requests), context)
            for answer in answers if method.streams_replies else (answers,):
                if isinstance(answer, memoryview):
                    frames.send(DATA, answer)
                else:
                    frames.send(MESSAGE, answer.SerializeToString())


def _requests(frames: Frames, method: str) -> Iterator[Any]:
    """What a caller sends: messages, and data as memoryviews, each of which is there until the next is asked for.

    The first that is asked for tells the caller that the call was taken on.
    """
    frames.send(READY)
    request = METHODS[method].request
    takes_data = wire.carries_data(request)
    room = memoryview(b"")
    while (begun := frames.begin()) is not None and begun[0] != END:
        kind, size = begun
        if kind == DATA:
            if not takes_data:
                raise UsageError(f"{method} takes no data")
            if size > wire.CHUNK:
                raise UsageError(f"data of {size} bytes came at once, and {wire.CHUNK} are the most")
            room = room if room.nbytes else memoryview(bytearray(wire.CHUNK))
            frames.content_into(room[:size])
            yield room[:size]
        elif kind == MESSAGE:
            check_size(method, size)
            message = decoded(frames.content(size), request.FromString)
            if takes_data and message.HasField("data"):
                raise UsageError("data comes in frames of its own here, and in no message")
            yield message
        else:
            raise UsageError(f"a frame of the kind {kind}, where there is none such")

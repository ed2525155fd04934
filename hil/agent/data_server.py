"""Data connections of the agent: calls of the session that move data, over a Unix socket of their own, without gRPC.

The handlers, the rooms that bound how many calls go on, and what ends these are those of the gRPC server.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError, Message

from hil.agent.admission import Admission, largest_request
from hil.errors import UsageError
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
)
from hil.protocol.v1 import agent_pb2 as pb

# What a failed call still sends is read, so much of it and for so long, or its caller might not get to read why.
_UNREAD_BYTES = 64 << 20
_UNREAD_S = 2.0
_BACKLOG = 128


class DataCallContext:
    """What a handler may ask of a call on a data connection: as much of gRPC's context as these handlers use."""

    def __init__(self, frames: Frames) -> None:
        self.token = ""
        self.cancel = frames.cancel
        self.is_active = frames.is_open

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """The session's token, as a gRPC call carries it."""
        return ((wire.SESSION_KEY, self.token),)


class DataServer:
    """Listens at a Unix socket that only its user can open.

    Args:
        servicers: by the name of the service.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, path: str, admission: Admission, servicers: dict[str, Any]) -> None:
        self._path = Path(path)
        self._admission = admission
        self._servicers = servicers
        self._listener = socket.socket(socket.AF_UNIX)
        before = os.umask(0o077)
        try:
            self._path.unlink(missing_ok=True)
            self._listener.bind(path)
        except OSError:
            self._listener.close()
            raise
        finally:
            os.umask(before)
        self._listener.listen(_BACKLOG)
        threading.Thread(target=self._accept, daemon=True, name="data").start()

    def close(self) -> None:
        """Take on no more calls."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connected, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connected,), daemon=True, name="data-call").start()

    def _serve(self, connected: socket.socket) -> None:
        frames = Frames(connected)
        with contextlib.closing(frames), contextlib.suppress(ConnectionBroken):
            try:
                self._answer(frames)
                frames.send(END)
            except ConnectionBroken:
                raise
            except Exception as error:
                frames.send(END, wire_errors.to_message(wire.failure(error), wire.KEPT_ERRORS).SerializeToString())
            frames.hang_up()
            frames.skip(_UNREAD_BYTES, _UNREAD_S)

    def _answer(self, frames: Frames) -> None:
        context = DataCallContext(frames)
        with self._admission.silent.entered(context):
            kind, size = frames.begin() or (END, 0)
            if kind != CALL or size > CALL_MOST:
                raise UsageError("a data connection begins with a call")
            called = _decoded(pb.DataCall, frames.content(size))
        if called.method not in METHODS:
            raise UsageError(f"{called.method[:100]!r} is no method of data connections")
        service, request_type, _ = METHODS[called.method]
        behaviour = getattr(self._servicers[service], called.method)
        context.token = called.session
        with self._admission.session_call(context):
            frames.send(READY)
            requests: Any = _requests(frames, called.method, request_type)
            if called.method == "Get":
                requests = next(requests, None)
                if not isinstance(requests, pb.GetRequest):
                    raise UsageError("the call carries no message")
            for answer in behaviour(requests, context):
                if isinstance(answer, memoryview):
                    frames.send(DATA, answer)
                else:
                    frames.send(MESSAGE, answer.SerializeToString())


def _requests(frames: Frames, method: str, kind_of_message: type[Message]) -> Iterator[Any]:
    """What a caller sends: messages, and data as memoryviews, each of which is there until the next is asked for."""
    largest = largest_request(method)
    room = memoryview(b"")
    while (begun := frames.begin()) is not None and begun[0] != END:
        kind, size = begun
        if kind == DATA:
            if size > wire.CHUNK:
                raise UsageError(f"data of {size} bytes came at once, and {wire.CHUNK} are the most")
            room = room if room.nbytes else memoryview(bytearray(wire.CHUNK))
            frames.content_into(room[:size])
            yield room[:size]
        elif kind == MESSAGE:
            if size > largest:
                raise UsageError(f"a request of {method} has {size} bytes, and {largest} are the most")
            yield _decoded(kind_of_message, frames.content(size))
        else:
            raise UsageError(f"a frame of the kind {kind}, where there is none such")


def _decoded(kind: type[Message], content: bytes) -> Any:
    try:
        return kind.FromString(content)
    except DecodeError as error:
        raise UsageError("the request is no message of this protocol") from error

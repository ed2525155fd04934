"""The protocol over gRPC: stubs and handlers made from the proto's descriptor.

Bulk data would be slow as protobuf messages (every ``bytes`` field is copied once more on either side). A ``data``
message is therefore coded by hand: tag, length, payload, which is what protobuf would write, so any other
implementation of the protocol reads it as the message it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from hil import errors
from hil.core.varint import varint
from hil.protocol import wire_errors
from hil.protocol.v1 import agent_pb2 as pb
from hil.protocol.wire import KEPT_ERRORS, PACKAGE, SERVICES, carries_data, failure

GRPC_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A cut link is found out within some 15 s although nothing is sent; one that comes back after 5 s is not lost, for
    # TCP sends again what got lost after 0.2, 0.6, 1.4, 3 and 6.2 s.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
)
# For what a closing channel or server still has to send.
CLOSE_S = 2.0


def close_channel(channel: grpc.Channel) -> None:
    """Cancel all calls of a channel and disconnect it.

    gRPC waits until what was sent has left. It never does where the far side reads no more and a Unix socket is full:
    that is waited for in a thread, which ends with this process.
    """
    closing = threading.Thread(target=channel.close, daemon=True, name="hil-channel")
    closing.start()
    closing.join(CLOSE_S)


# In every message that has a `data` field it is number 2, of type bytes.
_DATA_TAG = b"\x12"

Bulk: TypeAlias = "Message | memoryview"


def encode(message: Any) -> bytes:
    """A message's bytes; a memoryview is what a `data` message carries."""
    if isinstance(message, memoryview):
        return b"".join((_DATA_TAG, varint(message.nbytes), message))
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


def _decoder(kind: type[Message]) -> Callable[[bytes], Bulk]:
    def decode(raw: bytes) -> Bulk:
        if raw[:1] == _DATA_TAG:
            size = shift = 0
            for position in range(1, min(len(raw), 6)):
                size |= (raw[position] & 0x7F) << shift
                shift += 7
                if raw[position] < 0x80:
                    if position + 1 + size == len(raw):
                        return memoryview(raw)[position + 1 :]
                    break
        message = kind.FromString(raw)
        if message.WhichOneof("kind") == "data":
            return memoryview(message.data)  # type: ignore[attr-defined]
        return message

    return decode


def _methods(service: str) -> Iterable[tuple[str, str, bool, bool, Callable[[bytes], Any], Callable[[bytes], Any]]]:
    """Of each method of a service: name, path, whether either side streams, and the decoders of either side."""
    for method in pb.DESCRIPTOR.services_by_name[service].methods:
        decoders = []
        for descriptor in (method.input_type, method.output_type):
            kind = GetMessageClass(descriptor)
            decoders.append(_decoder(kind) if carries_data(kind) else kind.FromString)
        path = f"/{PACKAGE}.{service}/{method.name}"
        yield method.name, path, method.client_streaming, method.server_streaming, decoders[0], decoders[1]


class Stub:
    """The agent's methods over a channel, each under its name: ``stub.Describe(pb.DescribeRequest())``."""

    def __init__(self, channel: object) -> None:
        for service in SERVICES:
            for name, path, streams_in, streams_out, _, decode in _methods(service):
                make = getattr(channel, kind_of(streams_in, streams_out))
                setattr(self, name, make(path, request_serializer=encode, response_deserializer=_refusing(decode)))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def handlers(service: str, servicer: object) -> grpc.GenericRpcHandler:
    """A gRPC handler for one service whose methods are those of ``servicer`` with the same names."""
    table = {}
    for name, _, streams_in, streams_out, decode, _ in _methods(service):
        make = getattr(grpc, f"{kind_of(streams_in, streams_out)}_rpc_method_handler")
        behaviour = getattr(servicer, name)
        guard = guard_stream if streams_out else _guard
        table[name] = make(guard(behaviour), request_deserializer=decode, response_serializer=encode)
    return grpc.method_handlers_generic_handler(f"{PACKAGE}.{service}", table)


def kind_of(streams_in: bool, streams_out: bool) -> str:
    """What gRPC calls a method by whether either side streams: ``unary_stream``."""
    return f"{'stream' if streams_in else 'unary'}_{'stream' if streams_out else 'unary'}"


def _refusing(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Bytes that are no message are None: a handler raises an error of its own, and a caller's call ends INTERNAL."""

    def checked(raw: bytes) -> Any:
        try:
            return decode(raw)
        except DecodeError:
            return None

    return checked


def _guard(behaviour: Callable[[Any, grpc.ServicerContext], Any]) -> Callable[[Any, grpc.ServicerContext], Any]:
    def call(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return behaviour(request, context)
        except Exception as error:
            return fail(error, context)

    return call


def guard_stream(behaviour: Callable[[Any, grpc.ServicerContext], Any]) -> Callable[[Any, grpc.ServicerContext], Any]:
    """Make a handler of a call that answers with a stream tell its errors to the caller, typed."""

    def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from behaviour(request, context)
        except Exception as error:
            fail(error, context)

    return call


def fail(error: Exception, context: grpc.ServicerContext) -> None:
    """End a call with an error, as the protocol carries it."""
    if not isinstance(error, errors.HilError) and (type(error) is Exception or not context.is_active()):
        raise error  # grpc's own abort, or nobody there to tell
    error = failure(error)
    sent = wire_errors.to_message(error, KEPT_ERRORS)
    context.set_trailing_metadata(((wire_errors.ERROR_KEY, sent.SerializeToString()),))
    context.abort(_status(error), wire_errors.status_text(error))


def _status(error: errors.HilError) -> grpc.StatusCode:
    if isinstance(error, errors.UsageError):
        return grpc.StatusCode.INVALID_ARGUMENT
    if isinstance(error, errors.BoardRefused):
        return grpc.StatusCode.UNAUTHENTICATED
    if isinstance(error, errors.SessionEnded):
        return grpc.StatusCode.PERMISSION_DENIED
    if isinstance(error, errors.BoardBusy):
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    return grpc.StatusCode.FAILED_PRECONDITION if isinstance(error, errors.StageError) else grpc.StatusCode.INTERNAL


def error_of(call: grpc.RpcError) -> bytes:
    """The serialised ``Error`` that a failed call's trailing metadata carries; nothing where there is none."""
    metadata: Any = getattr(call, "trailing_metadata", tuple)() or ()
    return next((value for key, value in metadata if key == wire_errors.ERROR_KEY and isinstance(value, bytes)), b"")


def typed_error(call: grpc.RpcError) -> errors.HilError | None:
    """The typed error that the far side of a failed call sent; None where it sent none that can be read."""
    return wire_errors.from_bytes(error_of(call))

"""The protocol over gRPC: stubs and handlers built from the proto descriptor.

Protobuf copies every ``bytes`` field a second time on both sides, which is slow for bulk data. A ``data`` message is
therefore encoded by hand as tag, length and payload. Protobuf would write the same bytes, so other implementations can
read it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from hil import errors
from hil.core.varint import varint
from hil.protocol import wire_errors
from hil.protocol.bounded_message import parse_message
from hil.protocol.v1 import agent_pb2 as pb
from hil.protocol.wire import KEPT_ERRORS, PACKAGE, SERVICES, carries_data, failure

GRPC_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Keepalive detects a cut link within about 15 s. A link that recovers after 5 s is not lost: TCP retransmits after
    # 0.2, 0.6, 1.4, 3 and 6.2 s.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
)
# Time for a closing channel or server to send pending data.
CLOSE_S = 2.0


def close_channel(channel: grpc.Channel) -> None:
    """Cancel all calls of a channel and disconnect it.

    gRPC waits until sent data has left. If the peer no longer reads and a Unix socket is full, gRPC waits forever. The
    wait therefore runs in a daemon thread. This function waits for the thread for at most :data:`CLOSE_S` seconds.
    """
    closing = threading.Thread(target=channel.close, daemon=True, name="hil-channel")
    closing.start()
    closing.join(CLOSE_S)


# In every message, the `data` field has number 2 and type bytes.
_DATA_TAG = b"\x12"

Bulk: TypeAlias = "Message | memoryview"


def encode(message: Any) -> bytes:
    """Encode a message. A memoryview is the payload of a `data` message."""
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
        message = parse_message(kind, raw)
        if message.WhichOneof("kind") == "data":
            return memoryview(message.data)  # type: ignore[attr-defined]
        return message

    return decode


def _methods(service: str) -> Iterable[tuple[str, str, bool, bool, Callable[[bytes], Any], Callable[[bytes], Any]]]:
    """Yield the name, path, streaming flags and decoders (request, response) of each method of a service."""
    for method in pb.DESCRIPTOR.services_by_name[service].methods:
        decoders = []
        for descriptor in (method.input_type, method.output_type):
            kind = GetMessageClass(descriptor)
            decoders.append(_decoder(kind) if carries_data(kind) else partial(parse_message, kind))
        path = f"/{PACKAGE}.{service}/{method.name}"
        yield method.name, path, method.client_streaming, method.server_streaming, decoders[0], decoders[1]


class Stub:
    """Client stub with the agent's methods as attributes: ``stub.Describe(pb.DescribeRequest())``."""

    def __init__(self, channel: object) -> None:
        for service in SERVICES:
            for name, path, streams_in, streams_out, _, decode in _methods(service):
                make = getattr(channel, kind_of(streams_in, streams_out))
                setattr(self, name, make(path, request_serializer=encode, response_deserializer=_refusing(decode)))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def handlers(service: str, servicer: object) -> grpc.GenericRpcHandler:
    """Return a gRPC handler for a service. ``servicer`` has methods with the same names."""
    table = {}
    for name, _, streams_in, streams_out, decode, _ in _methods(service):
        make = getattr(grpc, f"{kind_of(streams_in, streams_out)}_rpc_method_handler")
        behaviour = getattr(servicer, name)
        guard = guard_stream if streams_out else _guard
        table[name] = make(guard(behaviour), request_deserializer=decode, response_serializer=encode)
    return grpc.method_handlers_generic_handler(f"{PACKAGE}.{service}", table)


def kind_of(streams_in: bool, streams_out: bool) -> str:
    """Return gRPC's name for a streaming kind, for example ``unary_stream``."""
    return f"{'stream' if streams_in else 'unary'}_{'stream' if streams_out else 'unary'}"


def _refusing(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return None for invalid messages: a handler raises an error, and a client's call ends with INTERNAL."""

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
    """Wrap a streaming handler so that errors reach the client as typed errors."""

    def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from behaviour(request, context)
        except Exception as error:
            fail(error, context)

    return call


def fail(error: Exception, context: grpc.ServicerContext) -> None:
    """Abort a call with a typed error."""
    if not isinstance(error, errors.HilError) and (type(error) is Exception or not context.is_active()):
        raise error  # gRPC's abort exception, or the client has disconnected
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
    """Return the serialized ``Error`` from a failed call's trailing metadata, or b""."""
    metadata: Any = getattr(call, "trailing_metadata", tuple)() or ()
    return next((value for key, value in metadata if key == wire_errors.ERROR_KEY and isinstance(value, bytes)), b"")


def typed_error(call: grpc.RpcError) -> errors.HilError | None:
    """Return the typed error that the peer sent for a failed call, or None if it is missing or invalid."""
    return wire_errors.from_bytes(error_of(call))

"""Serve calls over gRPC, with the standard health and reflection services."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from hil.agent.admission import THREADS
from hil.agent.calls import Calls, check_size, decode_request
from hil.protocol import grpc_calls, wire
from hil.protocol.data_connection import METHODS, RpcMethod
from hil.protocol.listening import HANDSHAKE, listen_on

_OPTIONS = {
    **dict((*grpc_calls.GRPC_OPTIONS, HANDSHAKE)),
    "grpc.so_reuseport": 0,
    # gRPC rejects larger messages by their length, before reading them.
    "grpc.max_receive_message_length": wire.MESSAGE_MAX,
    "grpc.max_concurrent_streams": 128,
}
_BEARER = "Bearer "


class GrpcServer:
    """Running gRPC server. ``address`` is the actual listening address.

    Args:
        listen: ``unix:PATH`` or ``HOST:PORT`` (port 0 selects a free port).
        calls: serves the calls, also those of the health and reflection services.
        cert, key, client_ca: TLS files, see :func:`hil.protocol.listening.listen_on`.

    Raises:
        UsageError: listening failed.
    """

    def __init__(
        self,
        listen: str,
        calls: Calls,
        *,
        cert: Path | None = None,
        key: Path | None = None,
        client_ca: Path | None = None,
    ) -> None:
        # Threads are created on demand. Admission control guarantees a free thread.
        pool = futures.ThreadPoolExecutor(THREADS, thread_name_prefix="rpc")
        self._server = grpc.server(pool, interceptors=[CallInterceptor(calls)], options=tuple(_OPTIONS.items()))
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [f"{wire.PACKAGE}.{service}" for service in wire.SERVICES]
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        self.address = listen_on(self._server, listen, cert=cert, key=key, client_ca=client_ca)
        self._server.start()
        for service in ("", *names):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Cancel all calls and stop the server."""
        self._health.enter_graceful_shutdown()
        # gRPC may never count a cancelled call as finished, so limit the wait.
        self._server.stop(grace=0.2).wait(2.0)


class CallInterceptor(grpc.ServerInterceptor):
    """Serve every method as a byte stream: gRPC would read a unary request before admission control runs."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a method. Part of gRPC's interface."""
        path, handler = details.method, None
        name = path.rpartition("/")[2]
        method = METHODS.get(name)
        if method is not None and method.path == path:
            decode, encode = partial(grpc_calls.decode, method.request), grpc_calls.encode
        elif (found := continuation(details)) is not None:
            handler = found.unary_unary or found.unary_stream or found.stream_unary or found.stream_stream
            method = RpcMethod("", name, path, Message, Message, found.request_streaming, found.response_streaming)
            decode, encode = found.request_deserializer, found.response_serializer
        else:
            return None

        def serve(raw: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
            given = str(dict(context.invocation_metadata()).get("authorization", ""))
            self._calls.check_token(given[len(_BEARER) :] if given.startswith(_BEARER) else "")
            yield from self._calls.serve(method, _decode_requests(name, raw, decode), context, handler)

        return grpc.stream_stream_rpc_method_handler(grpc_calls.guard_stream(serve), response_serializer=encode)


def _decode_requests(name: str, raw: Iterator[bytes], decode: Callable[[bytes], Any]) -> Iterator[Any]:
    for data in raw:
        check_size(name, len(data))
        yield decode_request(data, decode)

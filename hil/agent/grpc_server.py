"""Serve the agent over gRPC, with the standard health and reflection services."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from hil.agent.admission import THREADS, Admission, argument_of, check_size, check_token, decoded
from hil.errors import BoardRefused
from hil.protocol import grpc_calls, wire
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
        admission: admission control for calls.
        servicers: service name -> handler object.
        token: token that clients must present; "" disables the check.
        cert, key, client_ca: TLS files, see :func:`hil.protocol.listening.listen_on`.

    Raises:
        UsageError: listening failed.
    """

    def __init__(
        self,
        listen: str,
        admission: Admission,
        servicers: Mapping[str, object],
        token: str,
        *,
        cert: Path | None = None,
        key: Path | None = None,
        client_ca: Path | None = None,
    ) -> None:
        interceptors: list[grpc.ServerInterceptor] = [_TokenCheck(token)] if token else []
        interceptors.append(_Admitting(admission))
        # Threads are created on demand. Admission control guarantees a free thread.
        pool = futures.ThreadPoolExecutor(THREADS, thread_name_prefix="rpc")
        self._server = grpc.server(pool, interceptors=interceptors, options=tuple(_OPTIONS.items()))
        self._server.add_generic_rpc_handlers([grpc_calls.handlers(*item) for item in servicers.items()])
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


class _TokenCheck(grpc.ServerInterceptor):
    def __init__(self, token: str) -> None:
        self._token = token

    def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        given = str(dict(details.invocation_metadata).get("authorization", ""))
        try:
            check_token(self._token, given[len(_BEARER) :] if given.startswith(_BEARER) else "")
        except BoardRefused as error:
            return grpc.stream_stream_rpc_method_handler(partial(_refuse, error))
        return continuation(details)


def _refuse(error: BoardRefused, _: Any, context: grpc.ServicerContext) -> None:
    grpc_calls.fail(error, context)


class _Admitting(grpc.ServerInterceptor):
    """Interceptor that applies admission control, and decodes requests within their size limit in the call's thread."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        """Serve every method as a byte stream: gRPC would read a unary request before admission control runs."""
        handler = continuation(details)
        if handler is None:
            return None
        return grpc.stream_stream_rpc_method_handler(
            partial(self._serve, details.method, handler), response_serializer=handler.response_serializer
        )

    def _serve(self, method: str, handler: Any, raw: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            sent = _decoded(raw, method, handler.request_deserializer)
            with self._admission.admitted(method, handler.request_streaming, sent, context) as requests:
                yield from _answers(handler, requests, context)
        except Exception as error:
            grpc_calls.fail(error, context)


def _answers(handler: Any, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
    """Yield a handler's responses for any streaming kind."""
    sides = grpc_calls.kind_of(handler.request_streaming, handler.response_streaming)
    answer = getattr(handler, sides)(argument_of(requests, handler.request_streaming), context)
    if handler.response_streaming:
        yield from answer
    else:
        yield answer


def _decoded(raw: Iterator[bytes], method: str, decode: Any) -> Iterator[Any]:
    """Decode requests. Raises UsageError for invalid or oversized messages."""
    name = method.rpartition("/")[2]
    for data in raw:
        check_size(name, len(data))
        yield decoded(data, decode)

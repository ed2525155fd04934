"""Receiver of OpenTelemetry spans, like a collector."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent import futures
from typing import Any
from unittest import mock

import grpc

_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class Receiver:
    """Store received spans.

    Attributes:
        endpoint: for OTEL_EXPORTER_OTLP_ENDPOINT.
        spans: received spans, of any program.
    """

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb

        self.spans: list[Any] = []

        def export(request: Any, context: grpc.ServicerContext) -> Any:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    self.spans.extend(scope.spans)
            return pb.ExportTraceServiceResponse()

        method = grpc.unary_unary_rpc_method_handler(
            export,
            request_deserializer=pb.ExportTraceServiceRequest.FromString,
            response_serializer=pb.ExportTraceServiceResponse.SerializeToString,
        )
        service, _, name = _EXPORT[1:].partition("/")
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {name: method})])
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    @property
    def by_name(self) -> dict[str, Any]:
        return {span.name: span for span in self.spans}

    def stop(self) -> None:
        self._server.stop(None).wait()


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    """Receive the spans of this process and of its child processes."""
    from hil.controller.farm import telemetry

    receiver = Receiver()
    try:
        with mock.patch.dict(os.environ, {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}):
            telemetry._get_provider.cache_clear()
            yield receiver
            if (provider := telemetry._get_provider()) is not None:
                provider.shutdown()
    finally:
        telemetry._get_provider.cache_clear()
        receiver.stop()

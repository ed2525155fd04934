"""Export a job's stages as OpenTelemetry spans, and logs as JSON.

The stages of one job form one trace: submit, queue, fetch, open, run, upload, record. Tracing is off
unless ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set and the extra ``hil[otel]`` is installed. OpenTelemetry
reads other variables (headers, certificates, service name) from the environment as usual.

Each log record is a JSON object on one line:
``{"time": ..., "level": "INFO", "event": "grant", "job": "17.3", ...}``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
NAME = "hil.farm"


class TraceSpan:
    """Running stage. ``traceparent`` is the W3C parent for child spans, or "" without tracing."""

    def __init__(self, traceparent: str = "", inner: Any = None) -> None:
        self.traceparent = traceparent
        self._inner = inner

    def set(self, **attributes: Any) -> None:
        """Add attributes to the span."""
        if self._inner is not None:
            self._inner.set_attributes(_prefix_attributes(attributes))


@contextlib.contextmanager
def record_span(name: str, parent: str = "", **attributes: Any) -> Iterator[TraceSpan]:
    """Record a stage for the duration of the context. The span records an exception and re-raises it.

    Args:
        parent: W3C ``traceparent`` of the parent span; "" begins a trace.
    """
    tracer = _get_tracer()
    if tracer is None:
        yield TraceSpan(parent)
        return
    with tracer.start_as_current_span(name, _parse_context(parent), attributes=_prefix_attributes(attributes)) as inner:
        yield TraceSpan(_format_traceparent(inner), inner)


def record(name: str, parent: str, start_s: float, end_s: float, **attributes: Any) -> None:
    """Record a finished stage. Does nothing without a parent.

    Args:
        start_s, end_s: seconds since 1970.
    """
    tracer = _get_tracer() if parent else None
    if tracer is not None:
        inner = tracer.start_span(
            name, _parse_context(parent), attributes=_prefix_attributes(attributes), start_time=int(start_s * 1e9)
        )
        inner.end(int(end_s * 1e9))


def is_on() -> bool:
    """Return True if tracing is on."""
    return _get_provider() is not None


def flush() -> None:
    """Send pending spans. OpenTelemetry also does this when the program exits."""
    if (provider := _get_provider()) is not None:
        provider.force_flush(5_000)


def _prefix_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"hil.{name}": value for name, value in attributes.items() if value not in ("", None)}


def _format_traceparent(inner: Any) -> str:
    context = inner.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _parse_context(parent: str) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": parent}, Context())


def _get_tracer() -> Any:
    provider = _get_provider()
    return None if provider is None else provider.get_tracer(NAME)


@functools.cache
def _get_provider() -> Any:
    """Return the tracer provider, or None if tracing is off."""
    if (
        not any(os.environ.get(name) for name in _ENDPOINTS)
        or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    ):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        return None
    provider = TracerProvider(resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", NAME)}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


_STANDARD_FIELDS = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """Format a record as one JSON object: time, level, event, then the fields of ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        entry = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "event": record.getMessage(),
            **{key: value for key, value in record.__dict__.items() if key not in _STANDARD_FIELDS},
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def log_json(stream: TextIO | None = None) -> None:
    """Log to a stream (default stderr): INFO and above from the farm, warnings from dependencies."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.getLogger().handlers[:] = [handler]
    logging.getLogger(NAME).setLevel(logging.INFO)

"""A job's stages as OpenTelemetry spans, which together are one trace: submit, queue, fetch, open, run, upload, record.

Nothing is done where ``OTEL_EXPORTER_OTLP_ENDPOINT`` is not set, or the extra ``hil[otel]`` is not installed. What
OpenTelemetry reads from the environment besides (headers, certificates, the service's name) holds here too.

Logs as JSON, an object a line: ``{"time": ..., "level": "INFO", "event": "grant", "job": "17.3", ...}``.
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


class Span:
    """A stage under way; ``traceparent`` makes others its children, "" where nothing is traced."""

    def __init__(self, traceparent: str = "", inner: Any = None) -> None:
        self.traceparent = traceparent
        self._inner = inner

    def set(self, **attributes: Any) -> None:
        """Say more of it."""
        if self._inner is not None:
            self._inner.set_attributes(_attributes(attributes))


@contextlib.contextmanager
def span(name: str, parent: str = "", **attributes: Any) -> Iterator[Span]:
    """A stage, from now until the context ends; an error that leaves it is noted and goes on. ``parent`` is the W3C
    ``traceparent`` of the span that it belongs to, "" begins a trace.
    """
    tracer = _tracer()
    if tracer is None:
        yield Span(parent)
        return
    with tracer.start_as_current_span(name, _context(parent), attributes=_attributes(attributes)) as inner:
        yield Span(_traceparent(inner), inner)


def record(name: str, parent: str, start_s: float, end_s: float, **attributes: Any) -> None:
    """A stage that is over: from one time to another, in seconds since 1970. Of nothing that is traced it is none."""
    tracer = _tracer() if parent else None
    if tracer is not None:
        inner = tracer.start_span(
            name, _context(parent), attributes=_attributes(attributes), start_time=int(start_s * 1e9)
        )
        inner.end(int(end_s * 1e9))


def is_on() -> bool:
    """Whether anything is traced."""
    return _provider() is not None


def flush() -> None:
    """Send what was not sent yet; at a program's end this happens by itself."""
    if (provider := _provider()) is not None:
        provider.force_flush(5_000)


def _attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"hil.{name}": value for name, value in attributes.items() if value not in ("", None)}


def _traceparent(inner: Any) -> str:
    context = inner.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _context(parent: str) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": parent}, Context())


def _tracer() -> Any:
    provider = _provider()
    return None if provider is None else provider.get_tracer(NAME)


@functools.cache
def _provider() -> Any:
    """What sends spans away; None where nothing is to be traced."""
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


_OWN = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """A record as one JSON object: its time, level and event, then whatever was handed over as ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        """The record in one line."""
        entry = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "event": record.getMessage(),
            **{key: value for key, value in record.__dict__.items() if key not in _OWN},
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def log_json(stream: TextIO | None = None) -> None:
    """Send what this program logs to a stream (stderr): all of the farm's, and warnings of what it uses."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.getLogger().handlers[:] = [handler]
    logging.getLogger(NAME).setLevel(logging.INFO)

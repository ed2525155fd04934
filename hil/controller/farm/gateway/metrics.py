"""Prometheus metrics: counters of a gateway, and the farm's state, read from the database on each scrape."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import prometheus_client as prometheus
from prometheus_client.core import GaugeMetricFamily

from hil.controller.records.farm import FarmStats
from hil.errors import HilError, UsageError
from hil.protocol.listening import parse_host_port

_WAITS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800, 7200)
_CALLS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10)
_READ_SECONDS = 5.0
# Default address. Metrics reveal user activity, so other machines can read them only if the configuration sets an
# address.
_LOOPBACK = "127.0.0.1"


class Metrics:
    """Metrics of one gateway. Only one gateway counts each event."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        counter = partial(prometheus.Counter, registry=self.registry)
        histogram = partial(prometheus.Histogram, registry=self.registry)
        self._calls = histogram("hil_farm_rpc_seconds", "Duration of calls.", ("call", "code"), buckets=_CALLS_S)
        self._errors = counter("hil_farm_rpc_errors", "Failed calls, by status.", ("call", "code"))
        self._waits = histogram(
            "hil_farm_queue_wait_seconds", "Time from submission to grant.", ("priority",), buckets=_WAITS_S
        )
        self._grants = counter("hil_farm_grants", "Boards granted to jobs.", ("kind",))
        self.results = counter("hil_farm_results", "Final results, by outcome.", ("outcome",))
        self.expired = counter("hil_farm_leases_expired", "Leases that ended because the heartbeat stopped.")
        self.attending = prometheus.Gauge(
            "hil_farm_attending", "Boards with a worker attached to this gateway.", registry=self.registry
        )
        self._server: Any = None

    def count_call(self, call: str, code: str, seconds: float | None) -> None:
        """Count a finished call. Streams have no duration."""
        if seconds is not None:
            self._calls.labels(call, code).observe(seconds)
        if code != "OK":
            self._errors.labels(call, code).inc()

    def count_grant(self, kind: str, priority: str, waited_s: float) -> None:
        """Count a board granted to a job."""
        self._grants.labels(kind).inc()
        self._waits.labels(priority).observe(waited_s)

    def serve(self, listen: str, read: Callable[[], Awaitable[FarmStats]]) -> str:
        """Serve ``GET /metrics`` and return the address.

        Args:
            listen: ``HOST:PORT``; port 0 selects a free port, an empty host is loopback.
            read: returns the farm's ``stats``; called in the running event loop.

        Raises:
            UsageError: the address cannot be used.
        """
        self.registry.register(_FarmCollector(asyncio.get_running_loop(), read))
        host, port = parse_host_port(listen, what="metrics address", hint="--metrics HOST:PORT")
        host = host or _LOOPBACK
        try:
            self._server, thread = prometheus.start_http_server(port, host, self.registry)
        except OSError as error:
            raise UsageError(f"cannot serve metrics at {listen}: {error}") from error
        self._thread = thread
        return f"{listen.rpartition(':')[0] or _LOOPBACK}:{self._server.server_port}"

    def stop(self) -> None:
        """Stop the metrics server."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None


class _FarmCollector:
    """The farm's state as gauges. Collected in the HTTP server's thread, read in the gateway's event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, read: Callable[[], Awaitable[FarmStats]]) -> None:
        self._loop, self._read = loop, read

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        stats: FarmStats | None = None
        with contextlib.suppress(HilError, TimeoutError, asyncio.TimeoutError, RuntimeError):
            reading = asyncio.wait_for(self._read(), _READ_SECONDS)
            stats = asyncio.run_coroutine_threadsafe(reading, self._loop).result(_READ_SECONDS)
        yield GaugeMetricFamily("hil_farm_database_up", "Whether the database responds.", float(stats is not None))
        if stats is None:
            return
        for name, label, text in (
            ("jobs", "state", "Jobs by state."),
            ("boards", "state", "Boards by state."),
            ("queue", "priority", "Queued jobs, by priority."),
        ):
            gauge = GaugeMetricFamily(f"hil_farm_{name}", text, labels=(label,))
            for value, count in getattr(stats, name).items():
                gauge.add_metric((value,), count)
            yield gauge

"""What Prometheus reads of a gateway: counts of its own, and the farm's state from the database when it is asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any

import prometheus_client as prometheus
from prometheus_client.core import GaugeMetricFamily

from hil.errors import HilError, UsageError
from hil.protocol.listening import host_port

_WAITS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800, 7200)
_CALLS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10)
_READ_S = 5.0
# Numbers say what users do: who wants other machines to read them says so with an address of its own.
_LOOPBACK = "127.0.0.1"

Stats = Mapping[str, Any]


class Metrics:
    """The numbers of one gateway. Those that several gateways count apart are counted by one for each thing."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        counter = partial(prometheus.Counter, registry=self.registry)
        histogram = partial(prometheus.Histogram, registry=self.registry)
        self._calls = histogram("hil_farm_rpc_seconds", "How long calls took.", ("call", "code"), buckets=_CALLS_S)
        self._errors = counter("hil_farm_rpc_errors", "Calls that failed, by status.", ("call", "code"))
        self._waits = histogram(
            "hil_farm_queue_wait_seconds", "From submitted to granted.", ("priority",), buckets=_WAITS_S
        )
        self._grants = counter("hil_farm_grants", "Boards that were given to jobs.", ("kind",))
        self.results = counter("hil_farm_results", "Final results, by outcome.", ("outcome",))
        self.expired = counter("hil_farm_leases_expired", "Leases whose worker was not heard of any more.")
        self.attending = prometheus.Gauge(
            "hil_farm_attending", "Boards whose workers attend this gateway.", registry=self.registry
        )
        self._server: Any = None

    def called(self, call: str, code: str, seconds: float | None) -> None:
        """A call ended; a stream has no time."""
        if seconds is not None:
            self._calls.labels(call, code).observe(seconds)
        if code != "OK":
            self._errors.labels(call, code).inc()

    def granted(self, kind: str, priority: str, waited_s: float) -> None:
        """A job was given its board."""
        self._grants.labels(kind).inc()
        self._waits.labels(priority).observe(waited_s)

    def serve(self, listen: str, read: Callable[[], Awaitable[Stats]]) -> str:
        """Answer ``GET /metrics``; returns the address, UsageError where it cannot listen there.

        Args:
            listen: ``HOST:PORT``; port 0 is any free one, and without a host it is this machine alone.
            read: the farm's ``stats``, called in the running event loop.
        """
        self.registry.register(_Farm(asyncio.get_running_loop(), read))
        host, port = host_port(listen, what="address at which metrics can be served", hint="--metrics HOST:PORT")
        host = host or _LOOPBACK
        try:
            self._server, thread = prometheus.start_http_server(port, host, self.registry)
        except OSError as error:
            raise UsageError(f"metrics cannot be served at {listen}: {error}") from error
        self._thread = thread
        return f"{listen.rpartition(':')[0] or _LOOPBACK}:{self._server.server_port}"

    def stop(self) -> None:
        """Stop answering."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None


class _Farm:
    """The farm's state as gauges. Collected in the HTTP server's thread, read in the gateway's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, read: Callable[[], Awaitable[Stats]]) -> None:
        self._loop, self._read = loop, read

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        stats: Stats | None = None
        with contextlib.suppress(HilError, TimeoutError, asyncio.TimeoutError, RuntimeError):
            reading = asyncio.wait_for(self._read(), _READ_S)
            stats = asyncio.run_coroutine_threadsafe(reading, self._loop).result(_READ_S)
        yield GaugeMetricFamily("hil_farm_database_up", "Whether the database answers.", float(stats is not None))
        if stats is None:
            return
        for name, label, text in (
            ("jobs", "state", "Jobs by state."),
            ("boards", "state", "Boards by state."),
            ("queue", "priority", "Jobs that wait, by priority."),
        ):
            gauge = GaugeMetricFamily(f"hil_farm_{name}", text, labels=(label,))
            for value, count in stats[name].items():
                gauge.add_metric((value,), count)
            yield gauge

"""Prometheus metrics: counters of a gateway, and the farm's state, read from the database on each scrape."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

import prometheus_client as prometheus
from prometheus_client.core import GaugeMetricFamily

from hil.controller.farm.messages import BoardState
from hil.controller.records.lab.farm import FarmBoard, FarmStats
from hil.errors import HilError, UsageError
from hil.protocol.listening import parse_host_port

_WAITS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800, 7200)
_CALLS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10)
_READ_SECONDS = 5.0
# Default address. Metrics reveal user activity, so other machines can read them only if the configuration sets an
# address.
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class FarmSnapshot:
    """State of the farm, read for a scrape."""

    stats: FarmStats
    boards: Sequence[FarmBoard] = ()
    oldest_s: Mapping[str, float] = field(default_factory=dict)  # priority -> waiting time of the oldest queued job
    certificate_expires: datetime | None = None  # end of the gateway's TLS certificate; None without TLS


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
        self._results = counter("hil_farm_results", "Final results, by outcome.", ("outcome",))
        self._board_results = counter(
            "hil_farm_board_results", "Results of all attempts, by board and outcome.", ("board", "outcome")
        )
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

    def count_result(self, board: str, outcome: str, *, is_final: bool) -> None:
        """Count a result of a board. A job with a result that is not final runs again."""
        self._board_results.labels(board, outcome).inc()
        if is_final:
            self._results.labels(outcome).inc()

    def serve(self, listen: str, read: Callable[[], Awaitable[FarmSnapshot]]) -> str:
        """Serve ``GET /metrics`` and return the address.

        Args:
            listen: ``HOST:PORT``; port 0 selects a free port, an empty host is loopback.
            read: returns the farm's state; called in the running event loop.

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

    def __init__(self, loop: asyncio.AbstractEventLoop, read: Callable[[], Awaitable[FarmSnapshot]]) -> None:
        self._loop, self._read = loop, read

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        found: FarmSnapshot | None = None
        with contextlib.suppress(HilError, TimeoutError, asyncio.TimeoutError, RuntimeError):
            reading = asyncio.wait_for(self._read(), _READ_SECONDS)
            found = asyncio.run_coroutine_threadsafe(reading, self._loop).result(_READ_SECONDS)
        yield GaugeMetricFamily("hil_farm_database_up", "Whether the database responds.", float(found is not None))
        if found is None:
            return
        for name, label, text in (
            ("jobs", "state", "Jobs by state."),
            ("boards", "state", "Boards by state."),
            ("queue", "priority", "Queued jobs, by priority."),
        ):
            gauge = GaugeMetricFamily(f"hil_farm_{name}", text, labels=(label,))
            for value, count in getattr(found.stats, name).items():
                gauge.add_metric((value,), count)
            yield gauge
        oldest = GaugeMetricFamily(
            "hil_farm_oldest_job_seconds", "Waiting time of the oldest queued job.", labels=("priority",)
        )
        for priority, seconds in found.oldest_s.items():
            oldest.add_metric((priority,), seconds)
        yield oldest
        if found.certificate_expires:
            yield GaugeMetricFamily(
                "hil_farm_certificate_expires_timestamp_seconds",
                "Time when the gateway's TLS certificate expires.",
                found.certificate_expires.timestamp(),
            )
        yield from _make_board_gauges(found.boards)
        yield from _make_host_gauges(found.boards)


def _make_board_gauges(boards: Sequence[FarmBoard]) -> Iterator[GaugeMetricFamily]:
    """Yield the state of each board."""
    make = partial(GaugeMetricFamily, labels=("board",))
    online = GaugeMetricFamily(
        "hil_farm_board_online", "Whether jobs run on the board.", labels=("board", "host", "site", "type")
    )
    states = GaugeMetricFamily("hil_farm_board_state", "1 for the board's state.", labels=("board", "state"))
    busy = make("hil_farm_board_busy", "Whether the board has a job.")
    failed = make("hil_farm_board_failed_checks", "Failed checks in a row.")
    checked = make("hil_farm_board_last_check_timestamp_seconds", "Time of the last passed check.")
    for board in boards:
        online.add_metric((board.name, board.host, board.site, board.hw_type), _is_online(board))
        for state in BoardState:
            states.add_metric((board.name, state.value), board.state == state.value)
        busy.add_metric((board.name,), bool(board.job))
        failed.add_metric((board.name,), board.failures)
        if board.checked_at:
            checked.add_metric((board.name,), datetime.fromisoformat(board.checked_at).timestamp())
    yield from (online, states, busy, failed, checked)


def _make_host_gauges(boards: Sequence[FarmBoard]) -> Iterator[GaugeMetricFamily]:
    """Yield the numbers of boards of each host. Drained boards count as online: their host is connected."""
    make = partial(GaugeMetricFamily, labels=("host", "site"))
    every = make("hil_farm_host_boards", "Boards of the host.")
    online = make("hil_farm_host_boards_online", "Boards of the host that are not offline.")
    total = Counter((board.host, board.site) for board in boards)
    connected = Counter((one.host, one.site) for one in boards if one.state != BoardState.OFFLINE.value)
    for place, count in total.items():
        every.add_metric(place, count)
        online.add_metric(place, connected[place])
    yield from (every, online)


def _is_online(board: FarmBoard) -> bool:
    return board.state == BoardState.ONLINE.value

"""Gateway process: listening addresses, background tasks, startup and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc

from hil.controller.farm.database.database import Database, DatabaseAway, connect, convert_outages, end_tasks, migrate
from hil.controller.farm.gateway.artifacts import ArtifactService, ArtifactStore
from hil.controller.farm.gateway.calls import HandlerFactory
from hil.controller.farm.gateway.context import GatewayContext
from hil.controller.farm.gateway.history.recorder import HistoryRecorder
from hil.controller.farm.gateway.metrics import FarmSnapshot
from hil.controller.farm.gateway.services.farm_service import FarmService
from hil.controller.farm.gateway.services.host_service import HostService
from hil.controller.farm.leasing import sweeper, waiting_room
from hil.controller.farm.leasing.lease_queue import LeaseQueue
from hil.controller.farm.oidc.oidc_settings import OidcSettings
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store import presence, queries
from hil.controller.farm.store.records import fetch_rows
from hil.controller.farm.webhooks.webhook_settings import FarmWebhook
from hil.controller.pipeline.settings.history_settings import HistorySettings
from hil.protocol import grpc_calls
from hil.protocol.certificates import CertificateReloader, TlsFiles
from hil.protocol.listening import (
    HANDSHAKE,
    check_listen,
    check_tls_files,
    listen_on,
    parse_host_port,
    refuse_if_served,
    take_descriptors,
)

_LOG = logging.getLogger("hil.farm.gateway")
_MAX_MESSAGE = 64 << 20
_MAX_CALLS = 10_000
_GRACE_S, _AGAIN_S = 1.0, 0.5


@dataclass(frozen=True)
class GatewayConfig:
    """Configuration of a gateway."""

    db: str
    listen: tuple[str, ...]  # at least one ``unix:PATH`` or ``HOST:PORT`` (port 0: any free port)
    artifacts: str  # directory or URL of the artifact store
    # Server certificate and key as PEM files; required beyond loopback.
    tls_cert: Path | None = None
    tls_key: Path | None = None
    metrics: str = ""  # ``HOST:PORT`` for Prometheus metrics; "" disables them
    advertise: str = ""  # address of this gateway for hosts, if several gateways share an address
    settings: FarmSettings = field(default_factory=FarmSettings)
    history: HistorySettings | None = None  # history to which finished jobs are added; None for no history
    webhooks: tuple[FarmWebhook, ...] = ()
    oidc: OidcSettings | None = None  # login provider; None to accept only the farm's tokens
    patience_s: float = 30.0  # time to wait for the database at startup


class Gateway:
    """Running gateway. Created by :func:`run_gateway`."""

    def __init__(self, config: GatewayConfig, context: GatewayContext) -> None:
        self._config, self.context = config, context
        self._calls = HandlerFactory(context.access, context.metrics)
        self._tasks: list[asyncio.Task[None]] = []
        options = (
            *(one for one in grpc_calls.GRPC_OPTIONS if one[0] != "grpc.max_receive_message_length"),
            ("grpc.max_receive_message_length", _MAX_MESSAGE),
            ("grpc.so_reuseport", 0),
            HANDSHAKE,
        )
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=_MAX_CALLS)
        services = {
            "Farm": FarmService(context),
            "Hosts": HostService(context),
            "Artifacts": ArtifactService(context.db, context.store),
        }
        self._server.add_generic_rpc_handlers([self._calls.make_handlers(*item) for item in services.items()])
        self._certificate: CertificateReloader | None = None  # certificate that new connections use
        self.addresses: list[str] = []  # actual listening addresses
        self.metrics = ""  # metrics address; "" if disabled

    async def start(self) -> None:
        """Listen and start the background tasks. Raises UsageError if an address cannot be used."""
        config, context = self._config, self.context
        if config.advertise:
            parse_host_port(config.advertise, what="gateway address for hosts", hint="--advertise HOST:PORT")
        self.addresses = [
            listen_on(self._server, listen, cert=config.tls_cert, key=config.tls_key) for listen in config.listen
        ]
        context.advertise = config.advertise or self.addresses[0]
        context.name = f"{os.uname().nodename} {context.advertise}"
        if config.tls_cert and config.tls_key:
            self._certificate = CertificateReloader(TlsFiles(config.tls_cert, config.tls_key))
        if config.metrics:
            self.metrics = context.metrics.serve(config.metrics, self._read_state)
        beside: dict[str, Callable[[], Any]] = {
            "dispatch": context.dispatch.run,
            "measure": context.dispatch.measure,
            "queue": lambda: context.engine.listen(context.dispatch.trigger_check),
            "changes": lambda: context.pubsub.run(config.db),
            "ended": lambda: context.dispatch.follow(context.pubsub),
            "tunnels": lambda: context.tunnels.follow(context.pubsub),
            "beats": context.dispatch.write_beats,
            "printing": context.log_buffer.run,
            "clock": SweepTimer(context).run,
            "webhooks": context.webhooks.run,
        }
        if config.history:
            beside["history"] = HistoryRecorder(context, config.history).run
        async with context.db.transaction() as tx:
            await presence.record_gateway_start(tx, context.name)
        self._tasks = [asyncio.create_task(_run_forever(name, run), name=name) for name, run in beside.items()]
        await self._server.start()

    async def stop(self) -> None:
        """End every stream, so that callers reconnect to other gateways. Then stop the server and all tasks."""
        self._calls.stop()
        await self._server.stop(_GRACE_S)
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self.context.log_buffer.flush(), _GRACE_S)
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError, DatabaseAway):
            await asyncio.wait_for(self._note_stop(), _GRACE_S)
        await end_tasks(*self._tasks, *self.context.tasks)
        await asyncio.to_thread(self.context.metrics.stop)

    async def _note_stop(self) -> None:
        async with self.context.db.transaction() as tx:
            await presence.record_gateway_stop(tx, self.context.name)

    async def _read_state(self) -> FarmSnapshot:
        async with self.context.db.transaction() as tx:
            return FarmSnapshot(
                await queries.stats(tx, self.context.settings),
                await queries.boards(tx),
                await waiting_room.read_oldest_waits(tx),
                read_expiry(self._certificate.get_contents().cert) if self._certificate else None,
            )


def read_expiry(pem: bytes) -> datetime:
    """Return when the first certificate of a PEM file expires."""
    from cryptography import x509  # imported here, because most gateways start without TLS

    return x509.load_pem_x509_certificate(pem).not_valid_after_utc


@contextlib.asynccontextmanager
async def run_gateway(config: GatewayConfig) -> AsyncIterator[Gateway]:
    """Migrate the database and run a gateway inside the context.

    Raises:
        UsageError: an address cannot be used, or requires TLS.
        DatabaseAway: the database is unavailable.
    """
    _check_addresses(config)
    take_descriptors()
    store = ArtifactStore(config.artifacts)
    async with contextlib.AsyncExitStack() as stack:
        db = await _connect_database(config)
        stack.push_async_callback(db.close)
        engine = LeaseQueue(db)
        await engine.open()
        stack.push_async_callback(engine.close)
        more: dict[str, Any] = {
            "keeps_programs": bool(config.history),
            "webhooks": config.webhooks,
            "oidc": config.oidc,
        }
        gateway = Gateway(config, GatewayContext(db, engine, config.settings, store, **more))
        stack.push_async_callback(gateway.stop)
        await gateway.start()
        yield gateway


async def _connect_database(config: GatewayConfig) -> Database:
    """Connect to the database and migrate the schema. Retries while the database starts."""
    deadline = time.monotonic() + config.patience_s
    while True:
        try:
            await migrate(config.db)
            return await Database.open(config.db)
        except DatabaseAway as error:
            if time.monotonic() > deadline:
                raise
            _LOG.warning("database.away", extra={"reason": error.message})
            await asyncio.sleep(_AGAIN_S)


def _check_addresses(config: GatewayConfig) -> None:
    """Validate the listening addresses before opening anything."""
    check_tls_files(cert=config.tls_cert, key=config.tls_key, ca_needs_cert=True, listens=config.listen)
    for listen in config.listen:
        protected = bool(config.tls_cert and config.tls_key)
        check_listen(listen, protected=protected, needs="TLS", hint="set --tls-cert and --tls-key")
        if listen.startswith("unix:"):
            refuse_if_served(listen[len("unix:") :])


async def _run_forever(name: str, run: Callable[[], Any]) -> None:
    """Restart a background task when it fails, and log the error."""
    while True:
        try:
            await run()
        except DatabaseAway as error:
            _LOG.warning("database.away", extra={"task": name, "reason": error.message})
        except Exception:
            _LOG.exception("task.failed", extra={"task": name})
        await asyncio.sleep(_GRACE_S)


_TICK_SECONDS = 1.0
# Leases that this transaction ended because a worker or a holder stopped sending heartbeats.
_EXPIRED = """
    select lease.id as lease, lease.board, lease.reason
    from hil.events as event join hil.leases as lease on lease.id = event.lease
    where event.at >= now() and event.what = 'lease.ended'
        and least(lease.expires_at, lease.holder_until) < lease.ended_at and lease.result is null
"""


class SweepTimer:
    """Timer for the farm's periodic work. Every gateway has a timer, but only one gateway runs each sweep."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context

    async def run(self) -> None:
        """Task: sweep once a second.

        After an outage, leases expire only after peers have had time to send a heartbeat.
        """
        context = self._context
        heard_since = math.inf
        # Use wall clock time, as the database does: the clock advances during suspend, and an operator may set it.
        last = time.time()
        while True:
            if time.time() - last > _TICK_SECONDS + context.settings.lease_s / 2:
                # This process was frozen or waited for the database, so it received no heartbeats.
                heard_since = math.inf
            try:
                await self._run_sweep(heard_since)
                # Count heartbeats from now on, because the sweep may have waited long for the database.
                heard_since = min(heard_since, time.monotonic())
            except DatabaseAway:
                heard_since = math.inf
                await self._release_locks()
            last = time.time()
            await asyncio.sleep(_TICK_SECONDS)

    async def _release_locks(self) -> None:
        """Release the locks of a frozen gateway.

        Use a separate connection, because all others may wait for these locks.
        """
        with contextlib.suppress(DatabaseAway), convert_outages():
            async with await connect(self._context.db.url) as beside:
                await sweeper.terminate_frozen(beside)

    async def _run_sweep(self, heard_since: float) -> None:
        context = self._context
        async with context.db.transaction() as tx:
            has_heard = time.monotonic() - heard_since >= presence.LOST_S
            await presence.record_gateway_tick(tx, context.name, may_miss=has_heard)
            happened = await sweeper.run_periodic_work(tx, context.engine, context.settings, heard_since)
            expired = await fetch_rows(tx, _EXPIRED) if happened else []
        if happened:
            context.dispatch.trigger_check()
        context.metrics.expired.inc(len(expired))
        for row in expired:
            _LOG.warning("expired", extra=row)

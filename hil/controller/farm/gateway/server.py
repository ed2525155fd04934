"""A gateway: where it listens, what runs beside its calls, and its life from start to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from hil.controller.farm.gateway.artifacts import ArtifactService, Store
from hil.controller.farm.gateway.calls import Calls
from hil.controller.farm.gateway.context import GatewayContext
from hil.controller.farm.gateway.farm_service import FarmService
from hil.controller.farm.gateway.host_service import HostService
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store import queries, sweeper
from hil.controller.farm.store.database import Database, DatabaseAway, connect, end_tasks, migrate, seam
from hil.controller.farm.store.lease_queue import LeaseQueue
from hil.controller.farm.store.records import fetched
from hil.protocol import grpc_calls
from hil.protocol.listening import (
    HANDSHAKE,
    check_listen,
    check_tls_files,
    host_port,
    listen_on,
    refuse_if_served,
    take_descriptors,
)

_LOG = logging.getLogger("hil.farm.gateway")
_MOST_MESSAGE = 64 << 20
_MOST_CALLS = 10_000
_GRACE_S, _AGAIN_S = 1.0, 0.5


@dataclass(frozen=True)
class GatewayConfig:
    """How a gateway runs."""

    db: str
    listen: tuple[str, ...]  # ``unix:PATH`` and ``HOST:PORT`` (port 0: any free one), one or more
    artifacts: str  # folder or URL of the store of files
    # tls_cert, tls_key: the server's, PEM files; needed beyond loopback.
    tls_cert: Path | None = None
    tls_key: Path | None = None
    metrics: str = ""  # ``HOST:PORT`` where Prometheus asks, "" for nowhere
    advertise: str = ""  # where hosts reach this very gateway, where several stand behind one address
    settings: FarmSettings = field(default_factory=FarmSettings)
    patience_s: float = 30.0  # how long a database that is away is waited for at the start


class Gateway:
    """A gateway that serves. Made by :func:`serving`."""

    def __init__(self, config: GatewayConfig, context: GatewayContext) -> None:
        self._config, self.context = config, context
        self._calls = Calls(context.access, context.metrics)
        self._tasks: list[asyncio.Task[None]] = []
        options = (
            *(one for one in grpc_calls.GRPC_OPTIONS if one[0] != "grpc.max_receive_message_length"),
            ("grpc.max_receive_message_length", _MOST_MESSAGE),
            ("grpc.so_reuseport", 0),
            HANDSHAKE,
        )
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=_MOST_CALLS)
        services = {
            "Farm": FarmService(context),
            "Hosts": HostService(context),
            "Artifacts": ArtifactService(context.db, context.store),
        }
        self._server.add_generic_rpc_handlers([self._calls.handlers(*item) for item in services.items()])
        self.addresses: list[str] = []  # where it really listens
        self.metrics = ""  # where Prometheus asks, "" for nowhere

    async def start(self) -> None:
        """Listen, and begin what runs beside the calls; UsageError where it cannot listen there."""
        config, context = self._config, self.context
        if config.advertise:
            host_port(config.advertise, what="address where hosts reach a gateway", hint="--advertise HOST:PORT")
        self.addresses = [
            listen_on(self._server, listen, cert=config.tls_cert, key=config.tls_key) for listen in config.listen
        ]
        context.advertise = config.advertise or self.addresses[0]
        if config.metrics:
            self.metrics = context.metrics.serve(config.metrics, self._stats)
        beside: dict[str, Callable[[], Any]] = {
            "dispatch": context.dispatch.run,
            "measure": context.dispatch.measure,
            "queue": lambda: context.engine.listen(context.dispatch.poke),
            "changes": lambda: context.pubsub.run(config.db),
            "ended": lambda: context.dispatch.follow(context.pubsub),
            "tunnels": lambda: context.tunnels.follow(context.pubsub),
            "beats": context.dispatch.write_beats,
            "printing": context.log_buffer.run,
            "clock": SweepTimer(context).run,
        }
        self._tasks = [asyncio.create_task(_for_ever(name, run), name=name) for name, run in beside.items()]
        await self._server.start()

    async def stop(self) -> None:
        """End every stream, so that their callers go elsewhere, then all else."""
        self._calls.stop()
        await self._server.stop(_GRACE_S)
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self.context.log_buffer.flush(), _GRACE_S)
        await end_tasks(*self._tasks, *self.context.tasks)
        await asyncio.to_thread(self.context.metrics.stop)

    async def _stats(self) -> Any:
        async with self.context.db.transaction() as tx:
            return await queries.stats(tx, self.context.settings)


@contextlib.asynccontextmanager
async def serving(config: GatewayConfig) -> AsyncIterator[Gateway]:
    """A gateway, until the context ends. It brings the database's schema up to date first.

    Raises:
        UsageError: it cannot listen there, or may not without TLS.
        DatabaseAway: the database does not answer.
    """
    _check(config)
    take_descriptors()
    store = Store(config.artifacts)
    async with contextlib.AsyncExitStack() as stack:
        db = await _connected(config)
        stack.push_async_callback(db.close)
        engine = LeaseQueue(db)
        await engine.open()
        stack.push_async_callback(engine.close)
        gateway = Gateway(config, GatewayContext(db, engine, config.settings, store))
        stack.push_async_callback(gateway.stop)
        await gateway.start()
        yield gateway


async def _connected(config: GatewayConfig) -> Database:
    """The database, with the newest schema. One that is just starting is waited for."""
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


def _check(config: GatewayConfig) -> None:
    """Refuse where it may not listen, before anything is opened."""
    check_tls_files(cert=config.tls_cert, key=config.tls_key, ca_needs_cert=True, listens=config.listen)
    for listen in config.listen:
        protected = bool(config.tls_cert and config.tls_key)
        check_listen(listen, protected=protected, needs="TLS", hint="--tls-cert and --tls-key")
        if listen.startswith("unix:"):
            refuse_if_served(listen[len("unix:") :])


async def _for_ever(name: str, run: Callable[[], Any]) -> None:
    """What runs beside the calls begins again where it fails: the gateway goes on, and its log says why."""
    while True:
        try:
            await run()
        except DatabaseAway as error:
            _LOG.warning("database.away", extra={"task": name, "reason": error.message})
        except Exception:
            _LOG.exception("task.failed", extra={"task": name})
        await asyncio.sleep(_GRACE_S)


_TICK_S = 1.0
# The leases that this transaction ended because somebody was silent.
_EXPIRED = """
    select lease.id as lease, lease.board, lease.reason
    from hil.events as event join hil.leases as lease on lease.id = event.lease
    where event.at >= now() and event.what = 'lease.ended'
        and least(lease.expires_at, lease.holder_until) < lease.ended_at and lease.result is null
"""


class SweepTimer:
    """Ticks, at every gateway: of several that are due at once one does it."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context

    async def run(self) -> None:
        """Tick until cancelled. After an outage nobody expires who had no time yet to be heard of."""
        context = self._context
        heard_since = math.inf
        # By the wall clock, as the database reckons: it goes on while the machine sleeps, and may be set.
        last = time.time()
        while True:
            if time.time() - last > _TICK_S + context.settings.lease_s / 2:
                # We were frozen, or waited for the database, and heard nobody meanwhile.
                heard_since = math.inf
            try:
                await self._tick(heard_since)
                # From here on they can be heard: a tick may have waited long for the database.
                heard_since = min(heard_since, time.monotonic())
            except DatabaseAway:
                heard_since = math.inf
                await self._thaw()
            last = time.time()
            await asyncio.sleep(_TICK_S)

    async def _thaw(self) -> None:
        """Perhaps it does answer, but all our connections wait for what a frozen gateway holds."""
        with contextlib.suppress(DatabaseAway), seam():
            async with await connect(self._context.db.url) as beside:
                await sweeper.thaw(beside)

    async def _tick(self, heard_since: float) -> None:
        context = self._context
        async with context.db.transaction() as tx:
            happened = await sweeper.tick(tx, context.engine, context.settings, heard_since)
            expired = await fetched(tx, _EXPIRED) if happened else []
        if happened:
            context.dispatch.poke()
        context.metrics.expired.inc(len(expired))
        for row in expired:
            _LOG.warning("expired", extra=row)

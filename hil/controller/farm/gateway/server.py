"""A gateway: where it listens, what runs beside its calls, and its life from start to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from hil.controller.farm.artifacts import Store
from hil.controller.farm.desk import reading
from hil.controller.farm.desk.database import Database, DatabaseAway
from hil.controller.farm.desk.engine import Engine
from hil.controller.farm.desk.migrate import migrate
from hil.controller.farm.gateway.access import Access
from hil.controller.farm.gateway.artifact_service import ArtifactService
from hil.controller.farm.gateway.calls import Calls
from hil.controller.farm.gateway.clockwork import Clockwork
from hil.controller.farm.gateway.dispatch import Dispatch
from hil.controller.farm.gateway.farm_service import FarmService
from hil.controller.farm.gateway.host_service import HostService
from hil.controller.farm.gateway.hub import Hub
from hil.controller.farm.gateway.metrics import Metrics
from hil.controller.farm.gateway.parts import Parts
from hil.controller.farm.gateway.presence import Presence
from hil.controller.farm.gateway.printing import Printing
from hil.controller.farm.gateway.tunnel import Tunnels
from hil.controller.farm.tasks import ended
from hil.controller.farm.terms import Terms
from hil.controller.farm.words import Bearer, Role
from hil.protocol import wire
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
_STATS = Bearer(user="farm", role=Role.VIEWER)


@dataclass(frozen=True)
class GatewayConfig:
    """How a gateway runs.

    Attributes:
        db: URL of the farm's database.
        listen: ``unix:PATH`` and ``HOST:PORT`` (port 0: any free one), one or more.
        artifacts: folder or URL of the store of files.
        tls_cert, tls_key: the server's, PEM files; needed beyond loopback.
        metrics: ``HOST:PORT`` where Prometheus asks, "" for nowhere.
        advertise: where hosts reach this very gateway, where several stand behind one address.
        terms: what the farm is run by.
        patience_s: how long a database that is away is waited for at the start.
    """

    db: str
    listen: tuple[str, ...]
    artifacts: str
    tls_cert: Path | None = None
    tls_key: Path | None = None
    metrics: str = ""
    advertise: str = ""
    terms: Terms = field(default_factory=Terms)
    patience_s: float = 30.0


class Gateway:
    """A gateway that serves. Made by :func:`serving`.

    Attributes:
        addresses: where it really listens.
        metrics: where Prometheus asks, "" for nowhere.
    """

    def __init__(self, config: GatewayConfig, parts: Parts) -> None:
        self._config, self.parts = config, parts
        self._calls = Calls(parts.access, parts.metrics)
        self._tasks: list[asyncio.Task[None]] = []
        options = (
            *(one for one in wire.GRPC_OPTIONS if one[0] != "grpc.max_receive_message_length"),
            ("grpc.max_receive_message_length", _MOST_MESSAGE),
            ("grpc.so_reuseport", 0),
            HANDSHAKE,
        )
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=_MOST_CALLS)
        services = {
            "Farm": FarmService(parts),
            "Hosts": HostService(parts),
            "Artifacts": ArtifactService(parts),
        }
        self._server.add_generic_rpc_handlers([self._calls.handlers(*item) for item in services.items()])
        self.addresses: list[str] = []
        self.metrics = ""

    async def start(self) -> None:
        """Listen, and begin what runs beside the calls.

        Raises:
            UsageError: it cannot listen there.
        """
        config, parts = self._config, self.parts
        if config.advertise:
            host_port(config.advertise, what="address where hosts reach a gateway", hint="--advertise HOST:PORT")
        self.addresses = [
            listen_on(self._server, listen, cert=config.tls_cert, key=config.tls_key) for listen in config.listen
        ]
        parts.advertise = config.advertise or self.addresses[0]
        if config.metrics:
            self.metrics = parts.metrics.serve(config.metrics, self._stats)
        beside: dict[str, Callable[[], Any]] = {
            "dispatch": parts.dispatch.run,
            "measure": parts.dispatch.measure,
            "queue": lambda: parts.engine.listen(self._queued),
            "changes": lambda: parts.hub.run(config.db),
            "ended": lambda: parts.dispatch.follow(parts.hub),
            "tunnels": lambda: parts.tunnels.follow(parts.hub),
            "beats": parts.presence.run,
            "printing": parts.printing.run,
            "clock": Clockwork(parts).run,
        }
        self._tasks = [asyncio.create_task(_for_ever(name, run), name=name) for name, run in beside.items()]
        await self._server.start()

    async def stop(self) -> None:
        """End every stream, so that their callers go elsewhere, then all else."""
        self._calls.stop()
        await self._server.stop(_GRACE_S)
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self.parts.printing.flush(), _GRACE_S)
        await ended(*self._tasks, *self.parts.tasks)
        await asyncio.to_thread(self.parts.metrics.stop)

    async def _queued(self, boards: set[str] | None) -> None:
        self.parts.dispatch.poke(boards)

    async def _stats(self) -> Any:
        async with self.parts.db.transaction() as tx:
            return await reading.ask(tx, "stats", {}, _STATS)


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
    db = await _connected(config)
    try:
        engine = Engine(db)
        await engine.open()
        try:
            metrics, hub = Metrics(), Hub()
            dispatch = Dispatch(db, engine, config.terms, metrics)
            presence = Presence(db, engine, dispatch, config.terms)
            access, printing, tunnels = Access(db), Printing(db), Tunnels()
            parts = Parts(db, engine, config.terms, store, access, hub, dispatch, presence, printing, tunnels, metrics)
            gateway = Gateway(config, parts)
            try:
                await gateway.start()
                yield gateway
            finally:
                await gateway.stop()
        finally:
            await engine.close()
    finally:
        await db.close()


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
    check_tls_files(cert=config.tls_cert, key=config.tls_key, ca_needs_cert=True)
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

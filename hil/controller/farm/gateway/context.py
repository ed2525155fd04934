"""Shared objects of a gateway's calls."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from hil.controller.farm.database.database import Database
from hil.controller.farm.database.notifications import PubSub
from hil.controller.farm.gateway.artifacts import ArtifactStore
from hil.controller.farm.gateway.attached_workers import Dispatcher
from hil.controller.farm.gateway.calls import Authenticator
from hil.controller.farm.gateway.log_buffer import LogBuffer
from hil.controller.farm.gateway.metrics import Metrics
from hil.controller.farm.gateway.tunnel import TunnelRegistry
from hil.controller.farm.leasing.lease_queue import LeaseQueue
from hil.controller.farm.oidc.oidc_settings import OidcSettings
from hil.controller.farm.oidc.token_verifier import TokenVerifier
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.webhooks.sender import WebhookSender
from hil.controller.farm.webhooks.webhook_settings import FarmWebhook


class GatewayContext:
    """Components of one gateway."""

    def __init__(
        self,
        db: Database,
        engine: LeaseQueue,
        settings: FarmSettings,
        store: ArtifactStore,
        *,
        keeps_programs: bool = False,
        webhooks: Sequence[FarmWebhook] = (),
        oidc: OidcSettings | None = None,
    ) -> None:
        self.db, self.engine, self.settings, self.store = db, engine, settings, store
        self.keeps_programs = keeps_programs  # True if hosts upload the programs of jobs for the history
        self.access = Authenticator(db, TokenVerifier(oidc) if oidc else None)
        self.pubsub = PubSub()
        self.webhooks = WebhookSender(db, self.pubsub, webhooks)
        self.metrics = Metrics()
        self.dispatch = Dispatcher(db, engine, settings, self.metrics)
        self.log_buffer = LogBuffer(db)  # buffers job output for the database
        self.tunnels = TunnelRegistry()  # connections to agents of leased boards
        self.advertise = ""  # address of this gateway for hosts
        self.name = ""  # name of this gateway in events
        self.tasks: set[asyncio.Task[None]] = set()  # background tasks that outlive their call

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a background task that outlives the call."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

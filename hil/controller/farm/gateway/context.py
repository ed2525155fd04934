"""What every call of a gateway works with."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from hil.controller.farm.gateway.artifacts import Store
from hil.controller.farm.gateway.attached_workers import Dispatch, Heartbeats
from hil.controller.farm.gateway.calls import Access
from hil.controller.farm.gateway.log_buffer import LogBuffer
from hil.controller.farm.gateway.metrics import Metrics
from hil.controller.farm.gateway.tunnel import Tunnels
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store.database import Database
from hil.controller.farm.store.lease_queue import LeaseQueue
from hil.controller.farm.store.notifications import PubSub


@dataclass
class GatewayContext:
    """The parts of one gateway."""

    db: Database
    engine: LeaseQueue
    settings: FarmSettings
    store: Store
    access: Access
    pubsub: PubSub
    dispatch: Dispatch  # the boards that are attended here, and what is sent to them
    heartbeats: Heartbeats  # what the database is told of their workers
    log_buffer: LogBuffer  # what jobs print, on its way to the database
    tunnels: Tunnels  # connections to agents of leased boards
    metrics: Metrics
    advertise: str = ""  # where hosts reach this very gateway, "" for where they attend
    tasks: set[asyncio.Task[None]] = field(default_factory=set)  # what runs beside the call that began it

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Let something run on beside the call that began it."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

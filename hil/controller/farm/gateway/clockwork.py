"""The farm's clock: once a second whatever has expired is ended, and boards are checked that are due."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time

from hil.controller.farm.desk import ticking
from hil.controller.farm.desk.database import DatabaseAway, connect, seam
from hil.controller.farm.gateway.parts import Parts

_LOG = logging.getLogger("hil.farm.gateway")
_TICK_S = 1.0
# The leases that this transaction ended because somebody was silent.
_EXPIRED = """
    select lease.id as lease, lease.board, lease.reason
    from hil.events as event join hil.leases as lease on lease.id = event.lease
    where event.at >= now() and event.what = 'lease.ended'
        and least(lease.expires_at, lease.holder_until) < lease.ended_at and lease.result is null
"""


class Clockwork:
    """Ticks, at every gateway: of several that are due at once one does it."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def run(self) -> None:
        """Tick until cancelled. After an outage nobody expires who had no time yet to be heard of."""
        parts = self._parts
        heard_since = math.inf
        # By the wall clock, as the database reckons: it goes on while the machine sleeps, and may be set.
        last = time.time()
        while True:
            if time.time() - last > _TICK_S + parts.terms.lease_s / 2:
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
            async with await connect(self._parts.db.url) as beside:
                await ticking.thaw(beside)

    async def _tick(self, heard_since: float) -> None:
        parts = self._parts
        async with parts.db.transaction() as tx:
            happened = await ticking.tick(tx, parts.engine, parts.terms, heard_since)
            expired = await (await tx.execute(_EXPIRED)).fetchall() if happened else []
        if happened:
            parts.dispatch.poke()
        parts.metrics.expired(len(expired))
        for row in expired:
            _LOG.warning("expired", extra=row)

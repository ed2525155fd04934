"""What jobs print, and what their cases came to: gathered for a moment, then written down together, so that the order
is kept and no line is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from hil.controller.farm.store import case_results, event_log
from hil.controller.farm.store.database import Database, DatabaseAway

_LOG = logging.getLogger("hil.farm.gateway")
_GATHER_S = 0.05
_AWAY_S = 0.3
# A worker that prints more than this beyond what was written down waits.
_MOST = 4 << 20
# The name, outcome and reason of a case that ended.
Case = tuple[str, str, str]


class LogBuffer:
    """The one writer of logs at this gateway."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._texts: list[tuple[int, str, tuple[Case, ...]]] = []
        self._size = 0
        self._growing = False
        self._some, self._urgent = asyncio.Event(), asyncio.Event()
        self._written = asyncio.Condition()

    async def add(self, lease: int, text: str, cases: tuple[Case, ...] = ()) -> None:
        """Lines of a lease's job, and cases of it that ended; waits while too much is on its way."""
        async with self._written:
            await self._written.wait_for(lambda: self._size < _MOST)
        if self._growing and self._texts[-1][0] == lease:
            _, before, ended = self._texts[-1]
            self._texts[-1] = (lease, before + text, ended + cases)
        else:
            self._texts.append((lease, text, cases))
            self._growing = True
        self._size += _size(text, cases)
        self._some.set()

    async def flush(self, lease: int | None = None) -> None:
        """Wait until what a lease's job has printed is written down; None: what all have."""
        if self._waits(lease):
            self._urgent.set()
            async with self._written:
                await self._written.wait_for(lambda: not self._waits(lease))

    def _waits(self, lease: int | None) -> bool:
        return any(lease in (one, None) for one, *_ in self._texts)

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._some.wait()
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), _GATHER_S)
            self._some.clear()
            self._urgent.clear()
            count, size = len(self._texts), sum(_size(text, cases) for _, text, cases in self._texts)
            now = self._texts[:count]
            # What comes meanwhile begins a new text.
            self._growing = False
            try:
                await self._write(now)
            except DatabaseAway:
                await asyncio.sleep(_AWAY_S)
                self._some.set()
                continue
            except Exception:
                # What cannot be written must not hold up what comes after it.
                _LOG.exception("logs.lost", extra={"leases": [lease for lease, *_ in now]})
            async with self._written:
                del self._texts[:count]
                self._size -= size
                self._written.notify_all()

    async def _write(self, texts: list[tuple[int, str, tuple[Case, ...]]]) -> None:
        async with self._db.transaction() as tx:
            for lease, text, cases in texts:
                # First: whoever is told of the lines looks at the cases.
                if cases:
                    await case_results.keep(tx, lease, cases)
                if text:
                    await event_log.append_output(tx, lease, text.replace("\0", "\ufffd"))


def _size(text: str, cases: tuple[Case, ...]) -> int:
    return len(text) + sum(len(part) for case in cases for part in case)

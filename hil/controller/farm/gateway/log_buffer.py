"""Buffer job output and case results briefly, then write the data to the database together.

The buffer preserves the order of the lines and loses no line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from hil.controller.farm.database.database import Database, DatabaseAway
from hil.controller.farm.store import case_results, event_log

_LOG = logging.getLogger("hil.farm.gateway")
_GATHER_SECONDS = 0.05
_AWAY_SECONDS = 0.3
# Buffer size in characters. While the buffer is full, workers that print must wait.
_MAX_CHARACTERS = 4 << 20
# Name, outcome and reason of a finished case.
Case = tuple[str, str, str]


class LogBuffer:
    """The only writer of logs in a gateway."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._texts: list[tuple[int, str, tuple[Case, ...]]] = []
        self._size = 0
        self._growing = False
        self._some, self._urgent = asyncio.Event(), asyncio.Event()
        self._written = asyncio.Condition()

    async def add(self, lease: int, text: str, cases: tuple[Case, ...] = ()) -> None:
        """Add output and finished cases of a lease's job. Waits while the buffer is full."""
        async with self._written:
            await self._written.wait_for(lambda: self._size < _MAX_CHARACTERS)
        if self._growing and self._texts[-1][0] == lease:
            _, before, ended = self._texts[-1]
            self._texts[-1] = (lease, before + text, ended + cases)
        else:
            self._texts.append((lease, text, cases))
            self._growing = True
        self._size += _measure_size(text, cases)
        self._some.set()

    async def flush(self, lease: int | None = None) -> None:
        """Wait until the output of a lease's job is written. None waits for all output."""
        if self._has_waiting(lease):
            self._urgent.set()
            async with self._written:
                await self._written.wait_for(lambda: not self._has_waiting(lease))

    def _has_waiting(self, lease: int | None) -> bool:
        return any(lease in (one, None) for one, *_ in self._texts)

    async def run(self) -> None:
        """Task: write the buffer to the database."""
        while True:
            await self._some.wait()
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), _GATHER_SECONDS)
            self._some.clear()
            self._urgent.clear()
            count, size = len(self._texts), sum(_measure_size(text, cases) for _, text, cases in self._texts)
            now = self._texts[:count]
            # Output that arrives during this write starts a new entry.
            self._growing = False
            try:
                await self._write_texts(now)
            except DatabaseAway:
                await asyncio.sleep(_AWAY_SECONDS)
                self._some.set()
                continue
            except Exception:
                # Drop output that cannot be written, so that it does not block later output.
                _LOG.exception("logs.lost", extra={"leases": [lease for lease, *_ in now]})
            async with self._written:
                del self._texts[:count]
                self._size -= size
                self._written.notify_all()

    async def _write_texts(self, texts: list[tuple[int, str, tuple[Case, ...]]]) -> None:
        async with self._db.transaction() as tx:
            for lease, text, cases in texts:
                # Write cases before output, because clients read the cases when they are notified of output.
                if cases:
                    await case_results.keep(tx, lease, cases)
                if text:
                    await event_log.append_output(tx, lease, text.replace("\0", "\ufffd"))


def _measure_size(text: str, cases: tuple[Case, ...]) -> int:
    return len(text) + sum(len(part) for case in cases for part in case)

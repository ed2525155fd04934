"""How tasks of asyncio are ended."""

from __future__ import annotations

import asyncio
from typing import Any

_AGAIN_S = 2.0


async def ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until all have ended, with whatever they raise; whoever is cancelled meanwhile waits, too.

    They are told again until they hear: before Python 3.12 a task that is cancelled in the very moment in which what it
    waits for comes, in ``asyncio.wait_for`` (which psycopg calls as well), goes on as if nothing had been said. So who
    cleans up for more than two seconds is interrupted at it.
    """
    cancelled: asyncio.CancelledError | None = None
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        try:
            await asyncio.wait(running, timeout=_AGAIN_S)
        except asyncio.CancelledError as error:
            cancelled = error
    await asyncio.gather(*tasks, return_exceptions=True)
    if cancelled is not None:
        raise cancelled

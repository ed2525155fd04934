"""A host's connection to a farm, in a thread of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from hil.controller.farm.host.uplink import Uplink, listen
from hil.controller.farm.paths import FarmAddress


@contextlib.contextmanager
def uplink(farm: FarmAddress, path: Path) -> Iterator[Path]:
    """An uplink to a farm at a socket's path, which is yielded."""
    loop = asyncio.new_event_loop()
    with listen(path) as listening:
        serving = loop.create_task(Uplink(farm).serve(listening))

        def run() -> None:
            asyncio.set_event_loop(loop)
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(serving)
            rest = asyncio.all_tasks(loop)
            for task in rest:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
            loop.close()

        thread = threading.Thread(target=run, daemon=True, name="uplink")
        thread.start()
        try:
            yield path
        finally:
            loop.call_soon_threadsafe(serving.cancel)
            thread.join(10)

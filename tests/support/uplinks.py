"""Connection of a host to a farm, in a separate thread of the test."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from hil.controller.farm.host.gateway_link.uplink import Uplink, listen
from hil.controller.farm.paths import FarmAddress


@contextlib.contextmanager
def uplink(farm: FarmAddress, path: Path) -> Iterator[Path]:
    """Yield an uplink to the farm at the path of a socket."""
    with listen(path) as listening, serving(farm, listening):
        yield path


@contextlib.contextmanager
def serving(farm: FarmAddress, listening: socket.socket) -> Iterator[None]:
    """Serve an uplink to a farm on a listening socket."""
    begun: concurrent.futures.Future[Callable[[], object]] = concurrent.futures.Future()

    async def serve() -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        begun.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        with contextlib.suppress(asyncio.CancelledError):
            await Uplink(farm).serve(listening)

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True, name="uplink")
    thread.start()
    try:
        yield
    finally:
        begun.result()()
        thread.join(10)

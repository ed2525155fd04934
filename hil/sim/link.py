"""Proxy that can cut or slow down connections between the simulator's address and the agent."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import Any

_PIECE = 1 << 16


class FaultyLink:
    """Proxy from address ``listen`` to address ``behind``, each ``unix:PATH`` or ``HOST:PORT``.

    Both directions transfer ``rate`` bytes per second (0: unlimited) with a latency of ``delay_s``. Raises OSError if
    listening failed.
    """

    def __init__(self, listen: str, behind: str, rate: float = 0.0, delay_s: float = 0.0) -> None:
        self._behind = behind
        self._rate = rate
        self._delay_s = delay_s
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        listening: concurrent.futures.Future[str] = concurrent.futures.Future()

        async def start() -> None:
            server: Any
            if listen.startswith("unix:"):
                server = await asyncio.start_unix_server(self._accept, listen[len("unix:") :])
                address = listen
            else:
                host, _, port = listen.rpartition(":")
                server = await asyncio.start_server(self._accept, host.strip("[]"), int(port))
                address = f"{host}:{server.sockets[0].getsockname()[1]}"
            listening.set_result(address)
            async with server:
                await server.serve_forever()

        def run() -> None:
            try:
                self._loop.run_until_complete(start())
            except asyncio.CancelledError:
                pass
            except OSError as error:
                listening.set_exception(error)

        threading.Thread(target=run, daemon=True, name="faulty-link").start()
        self.address = listening.result(10)

    def cut(self) -> None:
        """Abort all connections at once. New connections are accepted."""

        def abort_writers() -> None:
            for writer in list(self._writers):
                writer.transport.abort()

        self._loop.call_soon_threadsafe(abort_writers)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await self._connect_agent()
        except OSError:  # the agent ended; its clients must notice
            writer.transport.abort()
            return
        self._writers |= {writer, inner_writer}
        try:
            await asyncio.gather(self._pass(reader, inner_writer), self._pass(inner_reader, writer))
        finally:
            for end in (writer, inner_writer):
                end.transport.abort()
                self._writers.discard(end)

    async def _connect_agent(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._behind.startswith("unix:"):
            return await asyncio.open_unix_connection(self._behind[len("unix:") :])
        host, _, port = self._behind.rpartition(":")
        return await asyncio.open_connection(host.strip("[]"), int(port))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy data in one direction: limit the rate, then deliver after ``delay_s``."""
        line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=8)

        async def take() -> None:
            free_at = 0.0
            while data := await reader.read(_PIECE):
                if self._rate:
                    free_at = max(free_at, self._loop.time()) + len(data) / self._rate
                    await asyncio.sleep(max(free_at - self._loop.time(), 0))
                await line.put((self._loop.time() + self._delay_s, data))
            await line.put((0.0, b""))

        async def forward_data() -> None:
            while True:
                due, data = await line.get()
                await asyncio.sleep(max(due - self._loop.time(), 0))
                if not data:
                    return
                writer.write(data)
                await writer.drain()

        halves = [asyncio.ensure_future(take()), asyncio.ensure_future(forward_data())]
        try:
            await asyncio.gather(*halves)
        except OSError:  # one end disconnected; the abort below disconnects the other
            pass
        finally:
            for half in halves:
                half.cancel()
            await asyncio.gather(*halves, return_exceptions=True)
            writer.transport.abort()

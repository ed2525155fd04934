"""A host's connection to the farm, over which its boards' workers attend and report: one process has it.

A gRPC channel of its own would cost each worker 0.1 % of a core for a beat every 1.5 s, for its threads look for more
work 60 times after each message. A worker calls over a Unix socket instead, with frames as on a data connection of an
agent (:mod:`hil.protocol.data_connection`), a connection a call: CALL with the method's name, then READY with the
gateway's address from here, then MESSAGE from either side, and END, with a typed error where the call failed. Who hangs
up without END cancels its call.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import grpc.aio

from hil.controller.farm.client import (
    CONNECT_S,
    SILENT_S,
    gateways_that_listen,
    nobody_answers,
    open_channel,
    translated,
)
from hil.controller.farm.paths import FarmAddress
from hil.controller.farm.rpc import methods
from hil.errors import FarmUnreachable, HilError, StorageError, UsageError
from hil.protocol import wire_errors
from hil.protocol.data_connection import CALL, END, HEADER, MESSAGE, READY
from hil.protocol.listening import private_socket

_PATHS = {name: path for name, path, *_ in methods("Hosts")}
# Every worker of a host may call in the same moment. So many calls are accepted at a time.
_BACKLOG, _AT_ONCE = 1024, 16
# What a worker says at a time. A gateway takes less of it, and says so.
_MESSAGE_MOST = 1 << 30
_LOOKS, _LOOK_S = 25, 0.02
# An event loop that stood still for so long does not go on. The host's boards are offline by then.
_STUCK_S = 30.0


def listen(path: Path) -> socket.socket:
    """Listen for calls of this user; who calls while no uplink runs waits for the next one.

    Raises:
        StorageError: there can be no socket.
        UsageError: something else lies there.
    """
    try:
        with contextlib.ExitStack() as undo:
            listening = undo.enter_context(socket.socket(socket.AF_UNIX))
            with private_socket(path):
                listening.bind(str(path))
            listening.listen(_BACKLOG)
            undo.pop_all()
            return listening
    except OSError as error:
        hint = "its folder must be writable, and its name short (some 100 bytes): TMPDIR names another one"
        raise StorageError(f"{path} cannot be listened at: {error}", hint=hint) from error


def run(farm: FarmAddress, listening: socket.socket) -> None:
    """Carry calls to a farm for as long as this process lives.

    The kernel ends it (SIGALRM) where its event loop stands still: all boards of the host would be offline meanwhile.
    """

    async def serve() -> None:
        await asyncio.gather(Uplink(farm).serve(listening), _be_alive())

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    asyncio.run(serve())


async def _be_alive() -> None:
    while True:
        signal.setitimer(signal.ITIMER_REAL, _STUCK_S)
        await asyncio.sleep(_STUCK_S / 6)


class Uplink:
    """Carries calls to a gateway of a farm: all over one connection, until that, or the gateway, fails one."""

    def __init__(self, farm: FarmAddress) -> None:
        self._farm = farm
        self._connecting: asyncio.Task[_Link] | None = None

    async def serve(self, listening: socket.socket) -> None:
        """Carry the calls that come to a socket, until cancelled."""
        async with await asyncio.start_server(self._serve_call, sock=listening, backlog=_AT_ONCE) as server:
            listening.listen(_BACKLOG)
            await server.serve_forever()

    async def _serve_call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(_HungUp, ConnectionError):
                await _send_frame(writer, END, await self._carried(reader, writer))
        finally:
            writer.close()

    async def _carried(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Carry a call; what it failed with, as its END carries that."""
        try:
            await self._carry(reader, writer)
            return b""
        except (_HungUp, ConnectionError):
            raise
        except Exception as error:
            known = error if isinstance(error, HilError) else FarmUnreachable(f"{type(error).__name__}: {error}")
            return wire_errors.to_message(known).SerializeToString()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kind, name = await _read_frame(reader)
        path = _PATHS.get(name.decode(errors="replace")) if kind == CALL else None
        if path is None:
            raise UsageError(f"an uplink carries calls of {', '.join(_PATHS)}")
        async with self._linked() as link:
            await _send_frame(writer, READY, link.gateway.encode())
            # To the protocol below, every kind of call is a stream both ways.
            call: Any = link.channel.stream_stream(path)(metadata=self._farm.metadata)
            ends = _Ends(call)
            asking = asyncio.create_task(_ask(reader, call))
            answering = asyncio.create_task(_answer(call, writer))
            try:
                await asyncio.wait({asking, answering}, return_when=asyncio.FIRST_COMPLETED)
                await (answering if answering.done() else asking)
            except grpc.RpcError:
                if (error := await ends.error()) is not None:
                    raise translated(error) from error
            finally:
                call.cancel()
                asking.cancel()
                answering.cancel()
                await asyncio.gather(asking, answering, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _linked(self) -> AsyncIterator[_Link]:
        """The connection for a call. One that failed a call is no other's; it ends with the last that it carries."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
        connecting = self._connecting
        try:
            link = await asyncio.shield(connecting)
        except Exception:
            self._leave(connecting)
            raise
        link.calls += 1
        try:
            yield link
        except (FarmUnreachable, _HungUp):
            # Who hangs up may do so because the gateway is silent.
            self._leave(connecting)
            raise
        finally:
            link.calls -= 1
            if not link.calls and self._connecting is not connecting:
                await link.channel.close()

    def _leave(self, connecting: asyncio.Task[_Link]) -> None:
        if self._connecting is connecting:
            self._connecting = None

    async def _connect(self) -> _Link:
        listening = gateways_that_listen(self._farm)
        while (gateway := await asyncio.to_thread(next, listening, None)) is not None:
            channel = open_channel(gateway, self._farm.ca, grpc.aio)
            try:
                await asyncio.wait_for(channel.channel_ready(), CONNECT_S)
            except (TimeoutError, asyncio.TimeoutError):
                await channel.close()
                continue
            return _Link(channel, gateway)
        raise nobody_answers(self._farm)


class _Link:
    """A connection to a gateway."""

    def __init__(self, channel: grpc.aio.Channel, gateway: str) -> None:
        self.channel, self.gateway = channel, gateway
        self.calls = 0


class _HungUp(Exception):
    """The worker hung up before its call had ended."""


async def _ask(reader: asyncio.StreamReader, call: Any) -> None:
    """Send the gateway what a worker says, until that hangs up; raises _HungUp then.

    Nobody hears it hang up while the gateway takes no more, which is waited for no longer than it may be silent.
    """
    while True:
        kind, content = await _read_frame(reader)
        if kind not in (MESSAGE, END):
            continue
        sending = asyncio.ensure_future(call.write(content) if kind == MESSAGE else call.done_writing())
        sending.add_done_callback(_heed)
        # Not `wait_for`: before Python 3.12 who is cancelled there just when it was sent does not hear of it.
        if not (await asyncio.wait({sending}, timeout=SILENT_S))[0]:
            raise _HungUp


def _heed(sent: asyncio.Future[None]) -> None:
    """A call that has ended takes no more; its answer is on its way."""
    if not sent.cancelled():
        sent.exception()


class _Ends:
    """The ends that a call comes to: the gateway's, and gRPC's own where a message could not be sent any more, for the
    call was ending. In the call itself the later one hides the other.
    """

    def __init__(self, call: Any) -> None:
        self._told: list[grpc.aio.AioRpcError] = []
        call.add_done_callback(self._note)

    async def error(self) -> grpc.RpcError | None:
        """What the gateway ended the call with; None where it ended well."""
        for _ in range(_LOOKS):
            if theirs := [one for one in self._told if one.code() is not grpc.StatusCode.INTERNAL]:
                return None if theirs[0].code() is grpc.StatusCode.OK else theirs[0]
            await asyncio.sleep(_LOOK_S)
        return self._told[0]

    def _note(self, call: Any) -> None:
        parts = call.code(), call.initial_metadata(), call.trailing_metadata(), call.details()
        self._told.append(grpc.aio.AioRpcError(*map(_returned, parts)))


def _returned(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    raise RuntimeError("it waits")


async def _answer(call: Any, writer: asyncio.StreamWriter) -> None:
    async for reply in call:
        await _send_frame(writer, MESSAGE, reply)


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    try:
        kind, size = HEADER.unpack(await reader.readexactly(HEADER.size))
        if size > _MESSAGE_MOST:
            raise _HungUp
        return kind, await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise _HungUp from error


async def _send_frame(writer: asyncio.StreamWriter, kind: int, content: bytes) -> None:
    writer.write(HEADER.pack(kind, len(content)) + content)
    await writer.drain()

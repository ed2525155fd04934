"""Uplink: the process with a host's only connection to the farm, shared by all workers.

A worker with a separate gRPC channel would use 0.1 % of a core for a heartbeat every 1.5 s. The reason is that gRPC's
threads poll 60 times after every message. Instead, workers call over a Unix socket, one connection per call. The frames
are those of an agent's data connection (:mod:`hil.protocol.data_connection`): CALL with the method's name, READY with
the gateway's address, MESSAGE in either direction, and END, with a typed error if the call failed. Closing the
connection without END cancels the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError

from hil.controller.farm.client.client import (
    CONNECT_SECONDS,
    SILENT_S,
    iter_listening_gateways,
    make_unreachable_error,
    open_channel,
    translate_grpc_error,
)
from hil.controller.farm.paths import FarmAddress
from hil.controller.farm.rpc import iter_methods
from hil.errors import FarmUnreachable, HilError, StorageError, UsageError
from hil.protocol import wire_errors
from hil.protocol.bounded_message import MAX_FARM_FIELDS, parse_message
from hil.protocol.data_connection import CALL, END, HEADER, MESSAGE, READY
from hil.protocol.listening import restrict_socket
from hil.protocol.v1 import farm_pb2 as pb

T = TypeVar("T")

_PATHS = {name: path for name, path, *_ in iter_methods("Hosts")}
# All workers of a host may call at the same time. The second number limits the connections accepted per wakeup.
_BACKLOG, _AT_ONCE = 1024, 16
# Maximum size of a worker's message in bytes. Gateways have a lower limit and report an error above it.
_MAX_MESSAGE = 1 << 30
_LOOKS, _LOOK_S = 25, 0.02
# The uplink sends the heartbeats of all workers together, at multiples of this interval. Separate heartbeats would wake
# the uplink and the gateway each time, at four times the cost.
_BATCH_SECONDS = 0.25
_ATTEND = b"Attend"
# An event loop that blocks for this long has hung. The host's boards are offline by then.
_STUCK_SECONDS = 30.0


def listen(path: Path) -> socket.socket:
    """Listen for calls of this user. Calls that arrive while no uplink runs wait for the next uplink.

    Raises:
        StorageError: the socket cannot be created.
        UsageError: the path is in use by a different file.
    """
    try:
        with contextlib.ExitStack() as undo:
            listening = undo.enter_context(socket.socket(socket.AF_UNIX))
            with restrict_socket(path):
                listening.bind(str(path))
            listening.listen(_BACKLOG)
            undo.pop_all()
            return listening
    except OSError as error:
        hint = "the directory must be writable and the path at most about 100 bytes; set TMPDIR to a different one"
        raise StorageError(f"cannot listen on {path}: {error}", hint=hint) from error


def run(farm: FarmAddress, listening: socket.socket) -> None:
    """Forward calls to a farm while this process lives.

    If the event loop hangs, SIGALRM ends the process, so that the host starts a new uplink. Without an uplink, all
    boards of the host are offline.
    """

    async def serve() -> None:
        await asyncio.gather(Uplink(farm).serve(listening), _feed_watchdog())

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    asyncio.run(serve())


async def _feed_watchdog() -> None:
    while True:
        signal.setitimer(signal.ITIMER_REAL, _STUCK_SECONDS)
        await asyncio.sleep(_STUCK_SECONDS / 6)


class Uplink:
    """Forwards calls to a gateway over one connection. After a failed call, later calls use a new connection."""

    def __init__(self, farm: FarmAddress) -> None:
        self._farm = farm
        self._connecting: asyncio.Task[_Link] | None = None

    async def serve(self, listening: socket.socket) -> None:
        """Task: forward the calls on a socket."""
        async with await asyncio.start_server(self._serve_call, sock=listening, backlog=_AT_ONCE) as server:
            listening.listen(_BACKLOG)
            await server.serve_forever()

    async def _serve_call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(_HungUp, ConnectionError):
                await _send_frame(writer, END, await self._try_forward_call(reader, writer))
        finally:
            writer.close()

    async def _try_forward_call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Forward a call. Returns the serialized error for the END frame; empty on success."""
        try:
            await self._forward_call(reader, writer)
            return b""
        except (_HungUp, ConnectionError):
            raise
        except Exception as error:
            known = error if isinstance(error, HilError) else FarmUnreachable(f"{type(error).__name__}: {error}")
            return wire_errors.to_message(known).SerializeToString()

    async def _forward_call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kind, name = await _read_frame(reader)
        path = _PATHS.get(name.decode(errors="replace")) if kind == CALL else None
        if path is None:
            raise UsageError(f"unsupported uplink call; supported: {', '.join(_PATHS)}")
        async with self._use_link() as link:
            await _send_frame(writer, READY, link.gateway.encode())
            # On the wire, every call is a bidirectional stream.
            call: Any = link.channel.stream_stream(path)(metadata=self._farm.metadata)
            ends = _CallStatuses(call)
            asking = asyncio.create_task(_forward_messages(reader, call, gathers=name == _ATTEND))
            answering = asyncio.create_task(_forward_replies(call, writer))
            try:
                await asyncio.wait({asking, answering}, return_when=asyncio.FIRST_COMPLETED)
                await (answering if answering.done() else asking)
            except grpc.RpcError:
                if (error := await ends.error()) is not None:
                    raise translate_grpc_error(error) from error
            finally:
                call.cancel()
                asking.cancel()
                answering.cancel()
                await asyncio.gather(asking, answering, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _use_link(self) -> AsyncIterator[_Link]:
        """Yield the connection for a call. A failed connection is not reused, and closes after the last call."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._open_link())
        connecting = self._connecting
        try:
            link = await asyncio.shield(connecting)
        except Exception:
            self._drop_link(connecting)
            raise
        link.calls += 1
        try:
            yield link
        except (FarmUnreachable, _HungUp):
            # A worker may cancel a call because the gateway is silent.
            self._drop_link(connecting)
            raise
        finally:
            link.calls -= 1
            if not link.calls and self._connecting is not connecting:
                await link.channel.close()

    def _drop_link(self, connecting: asyncio.Task[_Link]) -> None:
        if self._connecting is connecting:
            self._connecting = None

    async def _open_link(self) -> _Link:
        listening = iter_listening_gateways(self._farm)
        while (gateway := await asyncio.to_thread(next, listening, None)) is not None:
            channel = open_channel(gateway, self._farm.ca, grpc.aio)
            try:
                await asyncio.wait_for(channel.channel_ready(), CONNECT_SECONDS)
            except (TimeoutError, asyncio.TimeoutError):
                await channel.close()
                continue
            return _Link(channel, gateway)
        raise make_unreachable_error(self._farm)


class _Link:
    """Connection to a gateway."""

    def __init__(self, channel: grpc.aio.Channel, gateway: str) -> None:
        self.channel, self.gateway = channel, gateway
        self.calls = 0


class _HungUp(Exception):
    """The worker closed the connection before the end of the call."""


async def _forward_messages(reader: asyncio.StreamReader, call: Any, *, gathers: bool) -> None:
    """Forward a worker's messages to the gateway. Raises _HungUp when the worker closes the connection.

    While the gateway accepts no data, this function does not detect a closed connection. It waits at most as long as a
    gateway may be silent, then raises _HungUp.

    Args:
        gathers: delay heartbeats to the common send time of all workers. The worker's next message ends the delay.
    """
    reading = _start_task(_read_frame(reader))
    try:
        while True:
            kind, content = await reading
            reading = _start_task(_read_frame(reader))
            if kind not in (MESSAGE, END):
                continue
            if gathers and kind == MESSAGE and _is_beat(content):
                await asyncio.wait({reading}, timeout=_time_to_next_send(asyncio.get_running_loop().time()))
            sending = _start_task(call.write(content) if kind == MESSAGE else call.done_writing())
            # Not `wait_for`: before Python 3.12 it loses a cancellation that arrives together with the result.
            if not (await asyncio.wait({sending}, timeout=SILENT_S))[0]:
                raise _HungUp
    finally:
        reading.cancel()


def _is_beat(content: bytes) -> bool:
    try:
        return bool(parse_message(pb.FromBoard, content, MAX_FARM_FIELDS).WhichOneof("kind") == "beat")
    except DecodeError:  # the gateway refuses it
        return False


def _time_to_next_send(now: float) -> float:
    """Return the seconds to the next common send time."""
    return _BATCH_SECONDS - now % _BATCH_SECONDS


def _start_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task and ignore its errors.

    Sending to an ended call fails, but the call's status is reported separately.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(_ignore_error)
    return task


def _ignore_error(done: asyncio.Task[T]) -> None:
    if not done.cancelled():
        done.exception()


class _CallStatuses:
    """Final statuses of a call.

    There may be two: the gateway's, and gRPC's if a message could not be sent to an ending call. The call object only
    reports the later one.
    """

    def __init__(self, call: Any) -> None:
        self._told: list[grpc.aio.AioRpcError] = []
        call.add_done_callback(self._record_status)

    async def error(self) -> grpc.RpcError | None:
        """Return the gateway's error, or None if the call succeeded."""
        for _ in range(_LOOKS):
            if theirs := [one for one in self._told if one.code() is not grpc.StatusCode.INTERNAL]:
                return None if theirs[0].code() is grpc.StatusCode.OK else theirs[0]
            await asyncio.sleep(_LOOK_S)
        return self._told[0]

    def _record_status(self, call: Any) -> None:
        parts = call.code(), call.initial_metadata(), call.trailing_metadata(), call.details()
        self._told.append(grpc.aio.AioRpcError(*map(_run_to_end, parts)))


def _run_to_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    raise RuntimeError("it waits")


async def _forward_replies(call: Any, writer: asyncio.StreamWriter) -> None:
    async for reply in call:
        await _send_frame(writer, MESSAGE, reply)


async def _read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    try:
        kind, size = HEADER.unpack(await reader.readexactly(HEADER.size))
        if size > _MAX_MESSAGE:
            raise _HungUp
        return kind, await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise _HungUp from error


async def _send_frame(writer: asyncio.StreamWriter, kind: int, content: bytes) -> None:
    writer.write(HEADER.pack(kind, len(content)) + content)
    await writer.drain()

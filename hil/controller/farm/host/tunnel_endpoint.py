"""An interactive lease on its board's host: connections of its holder, led to the agent's guard.

A holder is a stranger to the board. One that opened a session with a fence of its own choice would lock out everybody
after it, the farm first, so sessions are opened with the lease's fence and no other. The agent cannot tell a holder
from the board's host, and a tunnel of bytes cannot see a fence: only a server in between can, and it works with every
agent.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from hil.controller.devices.board_client import Target
from hil.controller.devices.grpc_call import agent_channel
from hil.controller.farm.client import open_channel, pass_on, pieces_from
from hil.controller.farm.paths import FarmAddress
from hil.controller.farm.rpc import DIAL_KEY, FarmStub
from hil.core.text import TextSink
from hil.errors import BoardError, HilError, UsageError
from hil.protocol import grpc_calls, wire
from hil.protocol.listening import listen_on
from hil.protocol.v1 import agent_pb2 as agent_pb
from hil.protocol.v1 import farm_pb2 as pb


class TunnelEndpoint:
    """The connections of one lease, until it is over; the holder's calls are served at ``address``, ``unix:PATH``."""

    def __init__(self, lease: int, address: str, farm: FarmAddress, say: TextSink) -> None:
        self.lease, self.address, self._farm, self._say = lease, address, farm, say
        self._lock = threading.Lock()
        self._open: dict[socket.socket, Any] = {}
        self._over = False

    def dialled(self, dial: pb.DialIn, gateway: str) -> None:
        """The holder wants a connection: it is made and carried by a thread of its own.

        Args:
            gateway: where it waits, if the dial does not say.
        """
        threading.Thread(target=self._carry, args=(dial, gateway), daemon=True, name="farm-dial").start()

    def close(self) -> None:
        """The lease is over: end all of them, and make no more."""
        with self._lock:
            self._over = True
            carried = list(self._open.items())
        for near, far in carried:
            far.cancel()
            with contextlib.suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)

    def _carry(self, dial: pb.DialIn, gateway: str) -> None:
        metadata = [*self._farm.metadata, (DIAL_KEY, dial.id)]
        try:
            channel = open_channel(dial.gateway or gateway, self._farm.ca)
        except HilError as error:
            return self._say(f"a connection of lease {self.lease} could not be carried: {error}")
        try:
            with socket.socket(socket.AF_UNIX) as near:
                near.connect(self.address.removeprefix("unix:"))
                far = FarmStub(channel).Accept(pieces_from(near), metadata=metadata)
                with self._lock:
                    self._open[near] = far
                    if self._over:
                        far.cancel()
                try:
                    pass_on(far, near)
                finally:
                    with self._lock:
                        del self._open[near]
        except (OSError, HilError) as error:
            self._say(f"a connection of lease {self.lease} could not be carried: {error}")
        except grpc.RpcError:
            pass  # the holder, or the gateway, hung up
        finally:
            grpc_calls.close_channel(channel)


# Calls at a time, each of which has a thread: as many as an agent serves.
_MOST_CALLS = 48
_LONG_S = 366 * 86400.0
_HOLD = f"/{wire.PACKAGE}.Sessions/Hold"
_OPTIONS = (
    *(option for option in grpc_calls.GRPC_OPTIONS if option[0] != "grpc.max_receive_message_length"),
    # A message of a holder's is held in memory whole, and an agent takes no larger one.
    ("grpc.max_receive_message_length", wire.MESSAGE_MAX),
)


class LeaseGuard(grpc.GenericRpcHandler):
    """Serves the agent to a lease's holder, on a Unix socket that only this user can open, until it is closed."""

    def __init__(self, target: Target, fence: int, path: Path) -> None:
        self._fence = fence
        self._channel = agent_channel(target)
        self._threads = ThreadPoolExecutor(_MOST_CALLS, thread_name_prefix="lease-guard")
        self._server = grpc.server(
            self._threads, handlers=[self], options=_OPTIONS, maximum_concurrent_rpcs=_MOST_CALLS
        )
        try:
            self.address = listen_on(self._server, f"unix:{path}")
        except UsageError:
            grpc_calls.close_channel(self._channel)
            raise
        self._server.start()

    def close(self) -> None:
        """End all calls, and serve no more."""
        self._server.stop(None).wait(grpc_calls.CLOSE_S)
        grpc_calls.close_channel(self._channel)
        self._threads.shutdown(wait=False)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """The handler of a method; None of one that holders may not call. gRPC's interface."""
        method = details.method
        service, _, _ = method.removeprefix(f"/{wire.PACKAGE}.").partition("/")
        if service not in wire.SERVICES:
            return None

        def pass_on(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            return self._pass_on(method, requests, context)

        # To the protocol below, every kind of call is a stream both ways.
        return grpc.stream_stream_rpc_method_handler(grpc_calls.guard_stream(pass_on))

    def _pass_on(self, method: str, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        refused: list[HilError] = []

        def checked() -> Iterator[bytes]:
            try:
                for request in requests:
                    if method == _HOLD:
                        self._check(request)
                    yield request
            except HilError as error:
                refused.append(error)
                call.cancel()
            except grpc.RpcError:  # the holder hung up
                call.cancel()

        kept = [(key, value) for key, value in context.invocation_metadata() if key == wire.SESSION_KEY]
        left = context.time_remaining()
        # Without a deadline it is a number of years that is too large for a deadline.
        timeout = left if left and left < _LONG_S else None
        ask: Any = self._channel.stream_stream(method)
        call = ask(checked(), timeout=timeout, metadata=kept)
        if not context.add_callback(call.cancel):
            call.cancel()
        try:
            yield from call
        except grpc.RpcError as error:
            if refused:
                raise refused[0] from None
            context.set_trailing_metadata(tuple((one.key, one.value) for one in error.trailing_metadata() or ()))
            context.abort(error.code(), error.details() or "")

    def _check(self, request: bytes) -> None:
        """Refuse to open a session with another fence than the lease's."""
        try:
            asked = agent_pb.HoldRequest.FromString(request)
        except DecodeError:
            raise UsageError("the request is no message of this protocol") from None
        if asked.WhichOneof("kind") == "open" and asked.open.fence != self._fence:
            raise BoardError(
                f"a session of this lease is opened with the lease's fence, {self._fence}, not with {asked.open.fence}",
                hint="the lease's board config has it: hil farm lease prints its path",
            )

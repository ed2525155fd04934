"""Host side of an interactive lease: forwards the holder's connections to the agent through a guard.

The holder is not trusted. A session with a fence of the holder's choice would lock out all later sessions, including
the farm's. So only the lease's fence is allowed. The agent cannot distinguish a holder from the host, and a byte tunnel
cannot inspect the fence. A server between the holder and the agent can inspect the fence, and works with every agent.
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

from hil.controller.devices.agent_client.grpc_stream import open_agent_channel
from hil.controller.devices.agent_client.interruptible_channel import InterruptibleChannel
from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.farm.client.client import iter_pieces, open_channel, pass_on
from hil.controller.farm.paths import FarmAddress
from hil.controller.farm.rpc import DIAL_KEY, FarmStub
from hil.core.text import TextSink
from hil.errors import BoardError, HilError, UsageError
from hil.protocol import grpc_calls, wire
from hil.protocol.listening import listen_on
from hil.protocol.v1 import agent_pb2 as agent_pb
from hil.protocol.v1 import farm_pb2 as pb


class TunnelEndpoint:
    """Connections of one lease.

    Args:
        address: socket that serves the holder's calls, ``unix:PATH``.
    """

    def __init__(self, lease: int, address: str, farm: FarmAddress, say: TextSink) -> None:
        self.lease, self.address, self._farm, self._say = lease, address, farm, say
        self._lock = threading.Lock()
        self._open: dict[socket.socket, Any] = {}
        self._over = False

    def open_dial(self, dial: pb.DialIn, gateway: str) -> None:
        """Open a connection for the holder, and forward data in a separate thread.

        Args:
            gateway: address to connect to if the dial does not contain one.
        """
        threading.Thread(target=self._forward_connection, args=(dial, gateway), daemon=True, name="farm-dial").start()

    def close(self) -> None:
        """Close all connections at the end of the lease, and refuse new ones."""
        with self._lock:
            self._over = True
            carried = list(self._open.items())
        for near, far in carried:
            far.cancel()
            with contextlib.suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)

    def _forward_connection(self, dial: pb.DialIn, gateway: str) -> None:
        metadata = [*self._farm.metadata, (DIAL_KEY, dial.id)]
        try:
            channel = open_channel(dial.gateway or gateway, self._farm.ca)
        except HilError as error:
            return self._say(f"connection of lease {self.lease} failed: {error}")
        try:
            with socket.socket(socket.AF_UNIX) as near:
                near.connect(self.address.removeprefix("unix:"))
                far = FarmStub(InterruptibleChannel(channel)).Accept(iter_pieces(near), metadata=metadata)
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
            self._say(f"connection of lease {self.lease} failed: {error}")
        except grpc.RpcError:
            pass  # the holder or the gateway closed the connection
        finally:
            grpc_calls.close_channel(channel)


# Maximum concurrent calls, the same as the agent's limit. Each call uses a thread.
_MAX_CALLS = 48
_LONG_SECONDS = 366 * 86400.0
_HOLD = f"/{wire.PACKAGE}.Sessions/Hold"
_OPTIONS = (
    *(option for option in grpc_calls.GRPC_OPTIONS if option[0] != "grpc.max_receive_message_length"),
    # This limit protects the memory. Agents do not accept larger messages.
    ("grpc.max_receive_message_length", wire.MESSAGE_MAX),
)


class LeaseGuard(grpc.GenericRpcHandler):
    """Server that gives a lease holder access to the agent, on a Unix socket that only this user can open."""

    def __init__(self, target: AgentEndpoint, fence: int, path: Path) -> None:
        self._fence = fence
        self._channel = open_agent_channel(target)
        self._threads = ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="lease-guard")
        self._server = grpc.server(self._threads, handlers=[self], options=_OPTIONS, maximum_concurrent_rpcs=_MAX_CALLS)
        try:
            self.address = listen_on(self._server, f"unix:{path}")
        except UsageError:
            grpc_calls.close_channel(self._channel)
            raise
        self._server.start()

    def close(self) -> None:
        """Cancel all calls and stop the server."""
        self._server.stop(None).wait(grpc_calls.CLOSE_SECONDS)
        grpc_calls.close_channel(self._channel)
        self._threads.shutdown(wait=False)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a method, or None if holders may not call the method. Part of gRPC's interface."""
        method = details.method
        service, _, _ = method.removeprefix(f"/{wire.PACKAGE}.").partition("/")
        if service not in wire.SERVICES:
            return None

        def pass_on(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            return self._forward_call(method, requests, context)

        # On the wire, every call is a bidirectional stream.
        return grpc.stream_stream_rpc_method_handler(grpc_calls.guard_stream(pass_on))

    def _forward_call(self, method: str, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        refused: list[HilError] = []

        def check_requests() -> Iterator[bytes]:
            try:
                for request in requests:
                    if method == _HOLD:
                        self._check_fence(request)
                    yield request
            except HilError as error:
                refused.append(error)
                call.cancel()
            except grpc.RpcError:  # the holder closed the connection
                call.cancel()

        kept = [(key, value) for key, value in context.invocation_metadata() if key == wire.SESSION_KEY]
        left = context.time_remaining()
        # Without a deadline, gRPC returns a number of years that is not a valid timeout.
        timeout = left if left and left < _LONG_SECONDS else None
        ask: Any = InterruptibleChannel(self._channel).stream_stream(method)
        call = ask(check_requests(), timeout=timeout, metadata=kept)
        if not context.add_callback(call.cancel):
            call.cancel()
        try:
            yield from call
        except grpc.RpcError as error:
            if refused:
                raise refused[0] from None
            context.set_trailing_metadata(tuple((one.key, one.value) for one in error.trailing_metadata() or ()))
            context.abort(error.code(), error.details() or "")

    def _check_fence(self, request: bytes) -> None:
        """Refuse to open a session with a fence other than the lease's."""
        try:
            asked = agent_pb.HoldRequest.FromString(request)
        except DecodeError:
            raise UsageError("invalid request: not a message of this protocol") from None
        if asked.WhichOneof("kind") == "open" and asked.open.fence != self._fence:
            raise BoardError(
                f"sessions of this lease must use fence {self._fence}, got {asked.open.fence}",
                hint="use the lease's board config; hil farm lease prints the path",
            )

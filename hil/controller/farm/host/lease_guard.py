"""The agent of a leased board, as the lease's holder may call it: a server on the board's host that passes calls on.

A holder is a stranger to the board. One that opened a session with a fence of its own choice would lock out everybody
after it, the farm first, so sessions are opened with the lease's fence and no other. The agent cannot tell a holder
from the board's host, and a tunnel of bytes cannot see a fence: only a server in between can, and it works with every
agent.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from hil.controller.devices.connection import Target, agent_channel
from hil.errors import BoardError, HilError, UsageError
from hil.protocol import wire
from hil.protocol.listening import listen_on
from hil.protocol.v1 import agent_pb2 as pb

# Calls at a time, each of which has a thread: as many as an agent serves.
_MOST_CALLS = 48
_LONG_S = 366 * 86400.0
_HOLD = f"/{wire.PACKAGE}.Sessions/Hold"
_OPTIONS = (
    *(option for option in wire.GRPC_OPTIONS if option[0] != "grpc.max_receive_message_length"),
    # A message of a holder's is held in memory whole, and an agent takes no larger one.
    ("grpc.max_receive_message_length", wire.MESSAGE_MAX),
)


class LeaseGuard(grpc.GenericRpcHandler):
    """Serves the agent to a lease's holder until it is closed.

    Args:
        target: the agent.
        fence: the lease's.
        path: the Unix socket to serve on; only this user can open it.

    Attributes:
        address: ``unix:PATH``.

    Raises:
        UsageError: it cannot listen there, or a TLS file of the target cannot be read.
    """

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
            wire.close_channel(self._channel)
            raise
        self._server.start()

    def close(self) -> None:
        """End all calls, and serve no more."""
        self._server.stop(None).wait(wire.CLOSE_S)
        wire.close_channel(self._channel)
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
        return grpc.stream_stream_rpc_method_handler(wire.guard_stream(pass_on))

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
        """Refuse to open a session with another fence than the lease's.

        Raises:
            UsageError: the request is none.
            BoardError: it is another one.
        """
        try:
            asked = pb.HoldRequest.FromString(request)
        except DecodeError:
            raise UsageError("the request is no message of this protocol") from None
        if asked.WhichOneof("kind") == "open" and asked.open.fence != self._fence:
            raise BoardError(
                f"a session of this lease is opened with the lease's fence, {self._fence}, not with {asked.open.fence}",
                hint="the lease's board config has it: hil farm lease prints its path",
            )

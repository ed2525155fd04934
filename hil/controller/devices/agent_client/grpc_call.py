"""Call over gRPC. The only module that translates gRPC errors of agent calls to :class:`CallFailed`."""

from __future__ import annotations

import collections
import contextlib
import queue
from collections.abc import Iterator
from typing import Any

import grpc

from hil import errors
from hil.controller.devices.agent_client import answers
from hil.controller.devices.agent_client.call import Call, CallFailed
from hil.controller.devices.agent_client.interrupts import InterruptibleChannel
from hil.controller.devices.board_client import AgentEndpoint
from hil.core.files import read_file
from hil.protocol import data_connection, grpc_calls, wire
from hil.protocol.listening import check_tls_files, check_token_way, grpc_address

_LOOK_S = 0.2
# Maximum number of queued outgoing messages per call.
_AHEAD = 2


class GrpcCall:
    """Call over gRPC.

    Args:
        called: The stub's method.
        method: Message types and streaming of the method.
        settings: Options of the call, such as metadata.
    """

    def __init__(self, called: Any, method: data_connection.RpcMethod, **settings: Any) -> None:
        self._streams_replies, self._settings = method.streams_replies, settings
        # Begin a unary call without waiting: receive() waits for the reply.
        self._called = called if method.streams_replies else called.future
        self._asked: queue.Queue[Any] | None = queue.Queue(_AHEAD) if method.streams_requests else None
        self._replies: Any = None
        self._is_cancelled = False
        if self._asked is not None:
            self._begin(iter(self._asked.get, None))

    def send(self, message: Any) -> None:
        """Send a message or data."""
        if self._asked is None:
            self._begin(message)
        else:
            # Copy data now: gRPC reads it later, when the caller may have reused the buffer.
            self._put(self._asked, grpc_calls.encode(message) if isinstance(message, memoryview) else message)

    def end(self) -> None:
        """Close the sending side."""
        if self._asked is not None:
            self._put(self._asked, None)

    def receive(self) -> Any:
        """Return the next message, or None at the end."""
        with _told():
            return next(self._replies, None) if self._streams_replies else self._replies.result()

    def receive_into(self, view: memoryview) -> int:
        """Receive the next data into a view. Return the number of bytes."""
        data = answers.data_of(self.receive(), view.nbytes)
        view[: data.nbytes] = data
        return data.nbytes

    def cancel(self) -> None:
        """Cancel the call and wake threads that wait in it."""
        self._is_cancelled = True
        if self._asked is not None:
            with contextlib.suppress(queue.Full):
                self._asked.put_nowait(None)
        if self._replies is not None:
            self._replies.cancel()

    def _begin(self, asked: Any) -> None:
        with _told():
            self._replies = self._called(asked, **self._settings)
        if self._is_cancelled:  # cancelled by another thread before the call began
            self._replies.cancel()

    def _put(self, asked: queue.Queue[Any], message: Any) -> None:
        while True:
            try:
                asked.put(message, timeout=_LOOK_S)
                return
            except queue.Full:
                # The queue stays full after the call has ended. The replies then contain the reason.
                if not self._replies.is_active():
                    with _told():
                        collections.deque(self._replies, maxlen=0)
                    raise answers.broken("the call ended before the upload finished") from None


class GrpcCalls:
    """Calls to one agent over gRPC. Raises as :func:`agent_channel`."""

    def __init__(self, target: AgentEndpoint) -> None:
        self._channel = agent_channel(target)
        self._stub = grpc_calls.Stub(InterruptibleChannel(self._channel))
        self._metadata = [("authorization", f"Bearer {target.token}")] if target.token else []

    def begin(self, method: str, session: str, *, waits: bool) -> Call:
        """Begin a call.

        Args:
            session: Token of the call's session; "" for none.
            waits: Whether to wait for the connection. Otherwise the call fails without a connection.
        """
        metadata = [*self._metadata, *([(wire.SESSION_KEY, session)] if session else [])]
        named = data_connection.METHODS[method]
        return GrpcCall(getattr(self._stub, method), named, metadata=metadata, wait_for_ready=waits)

    def is_answered(self, within_s: float) -> bool:
        """Return whether an agent accepts connections. A busy agent does; a hanging agent does not."""
        ready = grpc.channel_ready_future(self._channel)
        try:
            ready.result(within_s)
        except grpc.FutureTimeoutError:
            return False
        finally:
            ready.cancel()
        return True

    def close(self) -> None:
        """Cancel all calls and disconnect."""
        grpc_calls.close_channel(self._channel)


def agent_channel(target: AgentEndpoint) -> grpc.Channel:
    """Open a channel to an agent. Nothing is sent before the first call.

    Raises UsageError if a TLS file cannot be read, TLS options are incomplete, or the token would be sent unencrypted.
    """
    check_tls_files(cert=target.cert, key=target.key, ca=target.ca)
    if target.token:
        hint = "set the agent's certificate authority in the board's config: [connection] ca"
        check_token_way(target.address, encrypted=target.ca is not None, hint=hint)
    # With a shared pool, a new client would reuse the failing connection of an older client to the same address.
    options = [
        *grpc_calls.GRPC_OPTIONS,
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.service_config", answers.service_config()),
    ]
    if target.ca is None:
        return grpc.insecure_channel(grpc_address(target.address), options)
    try:
        key = read_file(target.key) if target.key else None
        certificate = read_file(target.cert) if target.cert else None
        credentials = grpc.ssl_channel_credentials(read_file(target.ca), key, certificate)
    except OSError as error:
        raise errors.UsageError(f"cannot read a TLS file: {error}") from error
    return grpc.secure_channel(target.address, credentials, options)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except grpc.FutureCancelledError as error:
        raise CallFailed("CANCELLED", "the call was cancelled") from error
    except grpc.RpcError as error:
        code, text = error.code(), error.details()
        raise CallFailed(code.name, text or "", grpc_calls.error_of(error)) from error
    except ValueError as error:  # the channel is closed
        raise CallFailed("CANCELLED", str(error)) from error

"""Transport over gRPC. The only module that translates gRPC errors of agent calls to :class:`CallFailed`."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc

from hil import errors
from hil.controller.devices.agent_client import answers
from hil.controller.devices.agent_client.call import CallFailed
from hil.controller.devices.agent_client.interruptible_channel import InterruptibleChannel
from hil.controller.devices.board_client import AgentEndpoint
from hil.core.files import read_file
from hil.protocol import grpc_calls, wire, wire_errors
from hil.protocol.data_connection import DATA, MESSAGE, METHODS, ConnectionBroken, RpcMethod
from hil.protocol.listening import check_tls_files, check_token_transport, escape_grpc_address

_LOOK_SECONDS = 0.2
# Maximum queued outgoing messages per call.
_AHEAD = 2


class GrpcChannel:
    """Channel to one agent. Raises the errors of :func:`open_agent_channel`."""

    def __init__(self, target: AgentEndpoint) -> None:
        self._channel = open_agent_channel(target)
        calls = InterruptibleChannel(self._channel)
        self._callables = {name: getattr(calls, method.kind)(method.path) for name, method in METHODS.items()}
        self._metadata = [("authorization", f"Bearer {target.token}")] if target.token else []

    def open(self, method: str, session: str, *, waits: bool) -> GrpcStream:
        """Open a call.

        Args:
            session: Token of the call's session; "" for none.
            waits: Whether to wait for the connection. Otherwise the call fails without a connection.
        """
        metadata = [*self._metadata, *([(wire.SESSION_KEY, session)] if session else [])]
        return GrpcStream(self._callables[method], METHODS[method], metadata=metadata, wait_for_ready=waits)

    def is_answered(self, within_s: float) -> bool:
        """Return whether an agent accepts connections. A busy agent accepts connections; a hanging agent does not."""
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


class GrpcStream:
    """Frames of one call over gRPC. The call begins with the first request, or at once if it streams requests.

    Args:
        called: The channel's callable for the method, which sends and returns bytes.
        settings: Options of the call, such as metadata.
    """

    def __init__(self, called: Any, method: RpcMethod, **settings: Any) -> None:
        self._streams_replies, self._has_data = method.streams_replies, wire.may_contain_data(method.reply)
        # Begin a unary call without waiting: begin() waits for the reply.
        self._called = partial(called if method.streams_replies else called.future, **settings)
        self._requests: queue.Queue[bytes | None] | None = queue.Queue(_AHEAD) if method.streams_requests else None
        self._call: Any = None
        self._replies: Iterator[bytes] = iter(())
        self._content: Any = b""
        self._is_cancelled = False
        if self._requests is not None:
            self._start(iter(self._requests.get, None))

    def send(self, kind: int, content: Any) -> None:
        """Send a message or data."""
        # Copy data now: gRPC reads it later, when the caller may have reused the buffer.
        request = grpc_calls.encode(content)
        if self._requests is None:
            self._start(request)
        else:
            self._put(self._requests, request)

    def end(self) -> None:
        """Close the sending side."""
        if self._requests is not None:
            self._put(self._requests, None)

    def is_readable(self) -> bool:
        """Return whether a message or the end has arrived."""
        return bool(self._call.is_readable())

    def begin(self) -> tuple[int, int] | None:
        """Wait for the next message. Return its kind and size, or None at the end."""
        with _convert_errors():
            if (message := next(self._replies, None)) is None:
                return None
        data = grpc_calls.find_data(message) if self._has_data else None
        self._content = message if data is None else data
        return MESSAGE if data is None else DATA, len(self._content)

    def content(self, size: int) -> bytes:
        """Return the current message."""
        content: bytes = self._content
        return content

    def content_into(self, view: memoryview) -> None:
        """Copy the current data to a view."""
        view[:] = self._content

    def cancel(self) -> None:
        """Cancel the call and wake threads that wait in it."""
        self._is_cancelled = True
        if self._requests is not None:
            with contextlib.suppress(queue.Full):
                self._requests.put_nowait(None)
        if self._call is not None:
            self._call.cancel()

    def _start(self, request: Any) -> None:
        with _convert_errors():
            self._call = call = self._called(request)
        self._replies = call if self._streams_replies else (one.result() for one in [call])
        if self._is_cancelled:  # cancelled by another thread before the call began
            call.cancel()

    def _put(self, requests: queue.Queue[bytes | None], request: bytes | None) -> None:
        while True:
            try:
                return requests.put(request, timeout=_LOOK_SECONDS)
            except queue.Full:
                # If the call has ended, the queue stays full. Stop sending; the replies contain the reason.
                if not self._call.is_active():
                    raise ConnectionBroken("the call ended before the upload finished") from None


def open_agent_channel(target: AgentEndpoint) -> grpc.Channel:
    """Open a channel to an agent. Nothing is sent before the first call.

    Raises UsageError if a TLS file cannot be read, TLS options are incomplete, or the token would be sent unencrypted.
    """
    check_tls_files(cert=target.cert, key=target.key, ca=target.ca)
    if target.token:
        hint = "set the agent's certificate authority in the board's config: [connection] ca"
        check_token_transport(target.address, encrypted=target.ca is not None, hint=hint)
    # Do not share connections: a new client would otherwise reuse the failing connection of an older client to the same
    # address.
    options = [
        *grpc_calls.GRPC_OPTIONS,
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.service_config", answers.make_service_config()),
    ]
    if target.ca is None:
        return grpc.insecure_channel(escape_grpc_address(target.address), options)
    try:
        key = read_file(target.key) if target.key else None
        certificate = read_file(target.cert) if target.cert else None
        credentials = grpc.ssl_channel_credentials(read_file(target.ca), key, certificate)
    except OSError as error:
        raise errors.UsageError(f"cannot read a TLS file: {error}") from error
    return grpc.secure_channel(target.address, credentials, options)


@contextlib.contextmanager
def _convert_errors() -> Iterator[None]:
    try:
        yield
    except grpc.FutureCancelledError as error:
        raise CallFailed("CANCELLED", "the call was cancelled") from error
    except grpc.RpcError as error:
        code, text, sent = error.code().name, error.details() or "", grpc_calls.read_error(error)
        is_invalid = code == "RESOURCE_EXHAUSTED" or (code == "INTERNAL" and "deserializ" in text)
        if is_invalid and wire_errors.decode_error(sent) is None:
            raise answers.make_protocol_error(
                f"it is over the size limit, or is not a protocol message ({text})"
            ) from error
        raise CallFailed(code, text, sent) from error
    except ValueError as error:  # the channel is closed
        raise CallFailed("CANCELLED", str(error)) from error
